//! Packages from PyPI, each pinned by its hash, unpacked in the target directory.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::process::{command, run, target};

/// Unpacks what the file `requirements` lists into `wheels/NAME` of the target directory, unless it is there, and says
/// where.
///
/// Nothing of it is built and nothing depends on the Python: the packages hold libraries, headers and programs.
pub(crate) fn unpacked(name: &str, requirements: &Path) -> Result<PathBuf> {
    let place = target()?.join("wheels").join(name);
    let listed = fs::read_to_string(requirements)
        .with_context(|| format!("cannot read {}", requirements.display()))?;
    // Written last, so a directory that has it is whole.
    let mark = place.join("requirements.txt");
    if fs::read_to_string(&mark).is_ok_and(|there| there == listed) {
        return Ok(place);
    }
    let part = place.with_extension(format!("{}.part", std::process::id()));
    let install = "-m pip install --quiet --no-deps --no-compile";
    let pinned = "--require-hashes --only-binary=:all: --requirement";
    run(command("python3")
        .args(install.split(' ').chain(pinned.split(' ')))
        .arg(requirements)
        .arg("--target")
        .arg(&part)
        .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        .env("PIP_ROOT_USER_ACTION", "ignore"))
    .with_context(|| format!("cannot fetch {name} from PyPI with python3 and pip"))?;
    fs::write(part.join("requirements.txt"), &listed)?;
    if place.exists() {
        fs::remove_dir_all(&place)?;
    }
    if fs::rename(&part, &place).is_err() {
        // Somebody else was faster; what lies there is the same.
        fs::remove_dir_all(&part)?;
    }
    Ok(place)
}
