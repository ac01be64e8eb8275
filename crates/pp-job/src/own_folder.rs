//! Folders of this user alone below one that everybody can write.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Where the folder of this name and user lies in the folder for temporary files.
pub(crate) fn in_temp(name: &str) -> PathBuf {
    let user = rustix::process::getuid().as_raw();
    std::env::temp_dir().join(format!("{name}-{user}"))
}

/// Makes the folder, or finds it there. It is this user's own and closed to others, so that no other user can put something
/// there.
///
/// # Errors
/// The folder cannot be made, belongs to another user, or is open to other users.
pub(crate) fn make(folder: &Path) -> io::Result<()> {
    // It lies in one that is there: a variable may be mistyped.
    let made = DirBuilder::new().mode(0o700).create(folder);
    made.or_else(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    })?;
    check(folder)
}

/// Refuses a folder of another user, and one that is open to other users.
///
/// # Errors
/// The folder is refused, or is not there.
pub(crate) fn check(folder: &Path) -> io::Result<()> {
    let about = std::fs::symlink_metadata(folder)?;
    let is_own = about.uid() == rustix::process::getuid().as_raw();
    if about.is_dir() && is_own && about.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::other("the folder is not this user's alone"))
}
