//! The environment variables that `pp` reads.

use std::collections::BTreeMap;
use std::ffi::OsString;

use pp_contract::Rank;
use pp_job::command_line::{DEVICES, JOB, LOSSES_FD, REPORT_FD, SUPERVISOR, say_aside};
use pp_transport::launch::Launch;

/// The environment of this process, read once, in `main`.
#[derive(Debug)]
pub struct Env(BTreeMap<OsString, OsString>);

/// The page with the table of all variables for users, which `pp --help` prints too.
const PAGE: &str = include_str!("../../../docs/environment.md");

/// The rows of that table: the name of a variable, what it says, and what holds without it.
fn variables() -> impl Iterator<Item = [&'static str; 3]> {
    let rows = PAGE.lines().filter(|line| line.starts_with("| `PP_"));
    rows.filter_map(|row| {
        let row = row.strip_prefix("| `")?.strip_suffix(" |")?;
        let (name, row) = row.split_once("` | ")?;
        let (what, default) = row.split_once(" | ")?;
        Some([name, what, default])
    })
}

/// Variables that `pp` gives its own ranks.
const INTERNAL: [&str; 5] = [DEVICES, JOB, LOSSES_FD, REPORT_FD, SUPERVISOR];
/// How variables of the tests begin.
const OF_TESTS: [&str; 2] = ["PP_FAKE_", "PP_TEST"];

/// Writes the section of `pp --help`.
#[must_use]
pub fn help() -> String {
    let line =
        |[name, what, default]: [&str; 3]| format!("  {name:<22}{what} [default: {default}]\n");
    let lines: String = variables().map(line).collect();
    format!("Environment:\n{}", lines.trim_end())
}

/// Says whether `pp`, a rank that it starts, or its tests read this variable.
fn is_known(name: &str) -> bool {
    variables().any(|[known, ..]| known == name)
        || INTERNAL.contains(&name)
        || OF_TESTS.iter().any(|prefix| name.starts_with(prefix))
}

impl Env {
    /// Reads the environment.
    #[must_use]
    pub fn read() -> Self {
        Self(std::env::vars_os().collect())
    }

    /// Gives a variable; `None` where it is not set.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<OsString> {
        self.0.get(name.as_ref() as &std::ffi::OsStr).cloned()
    }

    /// Takes out a variable that the program itself reads.
    pub fn take(&mut self, name: &str) -> Option<OsString> {
        self.0.remove(name.as_ref() as &std::ffi::OsStr)
    }

    /// Sets a variable that is not set, or empty.
    pub fn set_default(&mut self, name: &str, value: &str) {
        let variable = self.0.entry(name.into()).or_default();
        if variable.is_empty() {
            *variable = value.into();
        }
    }

    /// Gives a variable that is text; `None` where it is not set, or no text.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<String> {
        self.get(name)?.into_string().ok()
    }

    /// Gives what looks variables up.
    pub fn lookup(&self) -> impl Fn(&str) -> Option<OsString> {
        |name| self.get(name)
    }

    /// Gives names and values of the variables whose names begin like this.
    #[must_use]
    pub fn starting_with(&self, prefix: &str) -> Vec<(String, String)> {
        let named = self.0.iter().filter_map(|(name, value)| {
            let name = name.to_str().filter(|name| name.starts_with(prefix))?;
            Some((name.to_owned(), value.to_string_lossy().into_owned()))
        });
        named.collect()
    }

    /// Gives the rank that a launcher or a supervisor made this process, if one did.
    #[must_use]
    pub fn rank(&self) -> Option<Rank> {
        let launch = Launch::from_env(|name| self.text(name));
        launch.ok().flatten().map(|launch| launch.rank())
    }

    /// Notes each `PP_` variable that no code reads, once for a job: the supervisor does, or rank 0 of a launcher.
    pub fn note_unknown(&self) {
        if self.get(SUPERVISOR).is_some() || self.rank().is_some_and(|rank| rank.get() != 0) {
            return;
        }
        for (name, _) in self.starting_with("PP_") {
            if !is_known(&name) {
                say_aside(format!(
                    "pp: note: {name} is not a variable that pp reads; `pp --help` lists those that it reads"
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// The names of variables that the source files below a folder have as whole strings.
    fn named_in(folder: &Path, names: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                named_in(&path, names);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("env.rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let strings = text.split('"');
                let is_name = |s: &&str| {
                    s.starts_with("PP_")
                        && s.len() > "PP_".len()
                        && s.bytes().all(|b| b == b'_' || b.is_ascii_uppercase())
                };
                names.extend(strings.filter(is_name).map(str::to_owned));
            }
        }
    }

    #[test]
    fn the_table_has_the_variables_that_the_code_names_and_no_other() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut named = BTreeSet::new();
        for part in [
            "pp-bench",
            "pp-cli",
            "pp-command",
            "pp-video",
            "pp-job",
            "pp-meet",
            "pp-edges",
            "pp-gpu",
            "pp-runtime",
            "pp-kernels",
            "nccl-sys",
            "../plugins/aoti",
        ] {
            named_in(&crates.join(part).join("src"), &mut named);
        }
        named.retain(|name| !OF_TESTS.iter().any(|prefix| name.starts_with(prefix)));
        let table = variables().map(|[name, ..]| name);
        let table = table.chain(INTERNAL).map(str::to_owned).collect();
        assert_eq!(named, table);
    }
}
