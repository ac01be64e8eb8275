//! Starting other programs from the root of the workspace.

use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The root of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace")
}

/// The paths of all that lies in a folder, in order. A folder without a `/` in front is seen from the root, and so are they.
pub(crate) fn listed(folder: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    let folder = folder.as_ref();
    let entries = fs::read_dir(root().join(folder));
    let entries = entries.with_context(|| format!("cannot read {}", folder.display()))?;
    let path = |entry: std::io::Result<fs::DirEntry>| Ok(folder.join(entry?.file_name()));
    let mut paths = entries.map(path).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// The name of a file without its ending.
pub(crate) fn stem_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// Cargo's target directory: the environment and cargo's configuration files may move it. Cargo is asked once.
pub(crate) fn target() -> Result<&'static Path> {
    static TARGET: OnceLock<PathBuf> = OnceLock::new();
    if let Some(known) = TARGET.get() {
        return Ok(known);
    }
    let asked = target_of(&mut cargo("metadata --no-deps --format-version 1"))?;
    Ok(TARGET.get_or_init(|| asked))
}

fn target_of(metadata: &mut Command) -> Result<PathBuf> {
    let metadata: Value =
        serde_json::from_str(&output(metadata)?).context("cargo metadata printed no JSON")?;
    let target = metadata["target_directory"].as_str();
    Ok(target
        .context("cargo metadata printed no target_directory")?
        .into())
}

/// A program that starts in the root and reads nothing.
pub(crate) fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// The cargo that runs us, with arguments that have blanks between them.
pub(crate) fn cargo(args: &str) -> Command {
    let mut cargo = command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(args.split_whitespace());
    if args.contains("--release") {
        // An incremental build has many small codegen units, and what it makes is slower.
        cargo.env("CARGO_INCREMENTAL", "0");
    }
    cargo
}

/// Runs `command` to its end, saying on standard error what is run and how long it took.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    told(command, |command| {
        let status = command
            .status()
            .with_context(|| format!("cannot start {}", shown(command)))?;
        ensure!(status.success(), "{} ended with {status}", shown(command));
        Ok(())
    })
}

fn told<T>(command: &mut Command, run: impl FnOnce(&mut Command) -> Result<T>) -> Result<T> {
    let (bold, plain) = if std::io::stderr().is_terminal() {
        ("\x1b[1m", "\x1b[0m")
    } else {
        ("", "")
    };
    eprintln!("{bold}$ {}{plain}", shown(command));
    let started = Instant::now();
    let done = run(command)?;
    let seconds = started.elapsed().as_secs();
    if seconds > 0 {
        eprintln!("{bold}$ took {seconds} s{plain}");
    }
    Ok(done)
}

/// What `command` prints, which must be text. The standard error of a command that fails is passed on.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    if !output.status.success() {
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        bail!("{} ended with {}", shown(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("{} printed no text", shown(command)))
}

/// Says whether `command` can be started and ends well; what it prints is of no interest.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The name of the program and its arguments.
pub(crate) fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut words = vec![
        program
            .file_name()
            .unwrap_or(program.as_os_str())
            .to_string_lossy(),
    ];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy()));
    words.join(" ")
}

/// What git says of this repository, whichever user owns it.
pub(crate) fn git(args: &str) -> Result<String> {
    let mut git = command("git");
    output(git.args(["-c", "safe.directory=*"]).args(args.split(' ')))
        .map(|text| text.trim().to_owned())
}

/// The commit, and whether the tree differs from it.
pub(crate) fn described() -> Result<String> {
    git("describe --always --dirty --abbrev=12")
}

/// Runs a cargo command that builds the target `name`, and gives the program or shared library that cargo says it made.
pub(crate) fn built(cargo: &mut Command, name: &str) -> Result<PathBuf> {
    cargo.args(["--quiet", "--message-format=json-render-diagnostics"]);
    let messages = told(cargo.stderr(Stdio::inherit()), output)?;
    artifact(&messages, name).with_context(|| format!("cargo built no {name}"))
}

fn artifact(messages: &str, name: &str) -> Option<PathBuf> {
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    // The unit tests of a program have its name, too.
    let of_target = messages.filter(|message| {
        let is_unit_test = message["profile"]["test"] == true
            && message["target"]["kind"] != serde_json::json!(["test"]);
        message["target"]["name"] == name && !is_unit_test
    });
    let mut files = of_target.flat_map(|message| match &message["executable"] {
        Value::String(program) => vec![program.clone()],
        _ => serde_json::from_value(message["filenames"].clone()).unwrap_or_default(),
    });
    files
        .find(|file| !file.ends_with(".rlib") && !file.ends_with(".rmeta"))
        .map(PathBuf::from)
}

/// Builds `pp` in release mode and says where it is.
pub(crate) fn build_pp() -> Result<PathBuf> {
    build_program("pp-cli", "pp")
}

/// Builds a program of the workspace in release mode and says where it is.
pub(crate) fn build_program(package: &str, name: &str) -> Result<PathBuf> {
    built(
        &mut cargo(&format!("build --release --package {package}")),
        name,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_says_where_the_target_directory_is() {
        let place = |directory: &str| {
            let mut metadata = cargo("metadata --no-deps --format-version 1");
            target_of(metadata.env("CARGO_TARGET_DIR", directory)).unwrap()
        };
        assert_eq!(place("/somewhere/else"), Path::new("/somewhere/else"));
        assert_eq!(place("near"), root().join("near"));
    }

    #[test]
    fn a_release_is_not_built_incrementally() {
        let set = |args| {
            let off = ("CARGO_INCREMENTAL".as_ref(), Some("0".as_ref()));
            cargo(args).get_envs().any(|variable| variable == off)
        };
        assert!(set("build --release --package pp-cli"));
        assert!(!set("build --package pp-cli"));
    }

    #[test]
    fn cargo_says_where_a_file_that_it_built_is() {
        let messages = r#"{"target":{"name":"build-script-build"},"executable":"/t/build","filenames":["/t/build"]}
{"target":{"name":"pp"},"profile":{"test":true},"executable":"/t/deps/pp-0","filenames":["/t/deps/pp-0"]}
{"target":{"name":"pp"},"profile":{"test":false},"executable":"/t/triple/release/pp","filenames":["/t/triple/release/pp"]}
{"target":{"name":"pp_plugin"},"executable":null,"filenames":["/t/libpp_plugin.rlib","/t/libpp_plugin.so"]}
{"reason":"build-finished","success":true}"#;
        let place = |name| artifact(messages, name);
        assert_eq!(place("pp"), Some("/t/triple/release/pp".into()));
        assert_eq!(place("pp_plugin"), Some("/t/libpp_plugin.so".into()));
        assert_eq!(place("other"), None);
    }
}
