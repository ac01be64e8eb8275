//! The environment variables that `pp` reads.

use std::collections::BTreeMap;
use std::ffi::OsString;

use pp_contract::Rank;
use pp_job::{FRONT, REPORT_FD, SUPERVISOR, say_aside};
use pp_transport::launch::Launch;

/// The environment of this process, read once, in `main`.
#[derive(Debug)]
pub struct Env(BTreeMap<OsString, OsString>);

/// The name of a variable, what it says, and what holds without it.
type Variable = [&'static str; 3];

/// All variables for users: `pp --help` and `docs/environment.md` list them.
const VARIABLES: [Variable; 14] = [
    [
        "PP_CUBLASLT_LIB",
        "cublasLt library to load (`pp bench` with `--simulate gemm`)",
        "searched",
    ],
    [
        "PP_FLIGHT_DIR",
        "folder for flight recordings",
        "pp-flight-UID in the folder for temporary files",
    ],
    [
        "PP_FLIGHT_OPS",
        "operations that each rank keeps for its flight recording; 0 records nothing",
        "4096",
    ],
    [
        "PP_HEARTBEAT_MS",
        "milliseconds between heartbeats, 20 to 3600000, the same on both ranks; three missed end the job; 0 for none",
        "250",
    ],
    [
        "PP_JOB_ID",
        "name of the job, the same on both ranks; tells jobs with one secret apart",
        "from the launcher",
    ],
    [
        "PP_JOB_SECRET",
        "secret that the ranks of a launcher share, 16 bytes or more",
        "none",
    ],
    [
        "PP_JOB_SECRET_FILE",
        "file with that secret, readable by its owner alone",
        "none",
    ],
    [
        "PP_LOG",
        "log level: off, error, warn, info, debug or trace; or TARGET=LEVEL",
        "off",
    ],
    [
        "PP_MEET_WITHIN_MS",
        "milliseconds that the ranks of a launcher wait for each other, 100 to 3600000",
        "60000",
    ],
    ["PP_NCCL_LIB", "NCCL library to load", "searched"],
    [
        "PP_PORT",
        "TCP port on which rank 0 waits for the other rank",
        "from the launcher",
    ],
    [
        "PP_RENDEZVOUS",
        "how the ranks meet: auto, unix or tcp",
        "auto",
    ],
    [
        "PP_RESTART_WITHIN_MS",
        "milliseconds that the front waits for a Phase B that is started again, 100 to 3600000",
        "60000",
    ],
    [
        "PP_STUCK_MS",
        "milliseconds that a stage may take before it counts as stuck, 1000 to 3600000; 0 switches off all limits on time without progress",
        "120000",
    ],
];

/// Variables that `pp` gives its own ranks.
const INTERNAL: [&str; 2] = [REPORT_FD, SUPERVISOR];
/// How variables of the tests begin.
const OF_TESTS: [&str; 2] = ["PP_FAKE_", "PP_TEST"];

/// The section of `pp --help`.
pub(crate) fn help() -> String {
    let line =
        |[name, what, default]: &Variable| format!("  {name:<22}{what} [default: {default}]\n");
    let lines: String = VARIABLES.iter().map(line).collect();
    format!("Environment:\n{}", lines.trim_end())
}

/// Whether `pp`, a rank that it starts, or its tests read this variable.
fn is_known(name: &str) -> bool {
    VARIABLES.iter().any(|[known, ..]| *known == name)
        || INTERNAL.contains(&name)
        || OF_TESTS.iter().any(|prefix| name.starts_with(prefix))
}

impl Env {
    /// Reads the environment.
    #[must_use]
    pub fn read() -> Self {
        Self(std::env::vars_os().collect())
    }

    /// A variable; `None` where it is not set.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<OsString> {
        self.0.get(name.as_ref() as &std::ffi::OsStr).cloned()
    }

    /// Takes out a variable that the program itself reads.
    pub fn take(&mut self, name: &str) -> Option<OsString> {
        self.0.remove(name.as_ref() as &std::ffi::OsStr)
    }

    /// A variable that is text.
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        self.get(name)?.into_string().ok()
    }

    /// What looks variables up.
    pub fn lookup(&self) -> impl Fn(&str) -> Option<OsString> {
        |name| self.get(name)
    }

    /// Names and values of the variables whose names begin like this.
    pub(crate) fn starting_with(&self, prefix: &str) -> Vec<(String, String)> {
        let named = self.0.iter().filter_map(|(name, value)| {
            let name = name.to_str().filter(|name| name.starts_with(prefix))?;
            Some((name.to_owned(), value.to_string_lossy().into_owned()))
        });
        named.collect()
    }

    /// The rank that a launcher or a supervisor made this process, if one did.
    pub(crate) fn rank(&self) -> Option<Rank> {
        let launch = Launch::from_env(|name| self.text(name));
        launch.ok().flatten().map(|launch| launch.rank())
    }

    /// Notes each `PP_` variable that no code reads, once for a job: the supervisor does, or rank 0 of a launcher.
    pub(crate) fn note_unknown(&self) {
        if self.get(SUPERVISOR).is_some() || self.rank().is_some_and(|rank| rank != FRONT) {
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

    #[test]
    fn the_page_about_the_environment_has_the_same_table() {
        const PAGE: &str = include_str!("../../../docs/environment.md");
        let row = |[name, what, default]: &Variable| format!("| `{name}` | {what} | {default} |");
        let rows: Vec<_> = PAGE.lines().filter(|l| l.starts_with("| `PP_")).collect();
        assert_eq!(rows, VARIABLES.iter().map(row).collect::<Vec<_>>());
    }

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
            "pp-cli",
            "pp-job",
            "pp-transport",
            "pp-runtime",
            "pp-kernels",
            "nccl-sys",
        ] {
            named_in(&crates.join(part).join("src"), &mut named);
        }
        named.retain(|name| !OF_TESTS.iter().any(|prefix| name.starts_with(prefix)));
        let table = VARIABLES.iter().map(|[name, ..]| *name);
        let table = table.chain(INTERNAL).map(str::to_owned).collect();
        assert_eq!(named, table);
    }
}
