//! The environment variables that `pp` reads.

use pp_contract::Rank;

use crate::exit::say_aside;
use crate::job::FRONT;
use crate::job::reports::REPORT_FD;
use crate::job::supervise::{self, SUPERVISOR};

/// A variable for users.
struct Variable {
    name: &'static str,
    what: &'static str,
    default: &'static str,
}

const fn variable(name: &'static str, what: &'static str, default: &'static str) -> Variable {
    Variable {
        name,
        what,
        default,
    }
}

/// All variables for users: `pp --help` and `docs/environment.md` list them.
const VARIABLES: [Variable; 15] = [
    variable(
        "PP_CUBLASLT_LIB",
        "cublasLt library to load (`pp bench` with `--simulate gemm`)",
        "searched",
    ),
    variable(
        "PP_FAULT",
        "fault to make on purpose; `pp faults --hooks` lists the names",
        "none",
    ),
    variable(
        "PP_FLIGHT_DIR",
        "folder for flight recordings",
        "pp-flight-UID in the folder for temporary files",
    ),
    variable(
        "PP_FLIGHT_OPS",
        "operations that each rank keeps for its flight recording; 0 records nothing",
        "4096",
    ),
    variable(
        "PP_HEARTBEAT_MS",
        "milliseconds between heartbeats, the same on both ranks; three missed end the job; 0 for none",
        "250",
    ),
    variable(
        "PP_JOB_ID",
        "name of the job, the same on both ranks; tells jobs with one secret apart",
        "from the launcher",
    ),
    variable(
        "PP_JOB_SECRET",
        "secret that the ranks of a launcher share, 16 bytes or more",
        "none",
    ),
    variable(
        "PP_JOB_SECRET_FILE",
        "file with that secret, readable by its owner alone",
        "none",
    ),
    variable(
        "PP_LOG",
        "log level: off, error, warn, info, debug or trace; or TARGET=LEVEL",
        "off",
    ),
    variable(
        "PP_MEET_WITHIN_MS",
        "milliseconds that the ranks of a launcher wait for each other",
        "60000",
    ),
    variable("PP_NCCL_LIB", "NCCL library to load", "searched"),
    variable(
        "PP_PORT",
        "TCP port on which rank 0 waits for the other rank",
        "from the launcher",
    ),
    variable(
        "PP_RENDEZVOUS",
        "how the ranks meet: auto, unix or tcp",
        "auto",
    ),
    variable(
        "PP_RESTART_WITHIN_MS",
        "milliseconds that the front waits for a Phase B that is started again",
        "60000",
    ),
    variable(
        "PP_STUCK_MS",
        "milliseconds that a stage may take before it counts as stuck; 0 for no limit",
        "120000",
    ),
];

/// Variables that `pp` gives its own ranks.
const INTERNAL: [&str; 2] = [REPORT_FD, SUPERVISOR];
/// How variables of the tests begin.
const OF_TESTS: [&str; 2] = ["PP_FAKE_", "PP_TEST"];

/// The section of `pp --help`.
pub(crate) fn help() -> String {
    let line = |v: &Variable| format!("  {:<22}{} [default: {}]\n", v.name, v.what, v.default);
    let lines: String = VARIABLES.iter().map(line).collect();
    format!("Environment:\n{}", lines.trim_end())
}

/// Whether `pp`, a rank that it starts, or its tests read this variable.
fn is_known(name: &str) -> bool {
    VARIABLES.iter().any(|variable| variable.name == name)
        || INTERNAL.contains(&name)
        || OF_TESTS.iter().any(|prefix| name.starts_with(prefix))
}

/// Notes each `PP_` variable that nothing reads, once for a job: the supervisor does, or rank 0 of a launcher.
pub(crate) fn note_unknown(launched_as: Option<Rank>) {
    if supervise::is_supervised() || launched_as.is_some_and(|rank| rank != FRONT) {
        return;
    }
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("PP_") && !is_known(&name) {
            say_aside(format!(
                "pp: note: {name} is not a variable that pp reads; `pp --help` lists those that it reads"
            ));
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
        let row = |v: &Variable| format!("| `{}` | {} | {} |", v.name, v.what, v.default);
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
            "pp-transport",
            "pp-runtime",
            "pp-kernels",
            "nccl-sys",
        ] {
            named_in(&crates.join(part).join("src"), &mut named);
        }
        named.retain(|name| !OF_TESTS.iter().any(|prefix| name.starts_with(prefix)));
        let table = VARIABLES.iter().map(|variable| variable.name);
        let table = table.chain(INTERNAL).map(str::to_owned).collect();
        assert_eq!(named, table);
    }
}
