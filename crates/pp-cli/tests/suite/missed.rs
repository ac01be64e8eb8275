//! A rank that gives no sign of life before the ranks have met is missed; one that loads for long is not.

use std::process::Command;

use pp_testing::{Folder, c_library, process::run, video};

use crate::common::{folder, pp};

/// When it is loaded it keeps the process of one rank: stopped, until somebody lets it go on, or asleep; or it ends it.
const KEEPS_A_RANK: &str = r#"
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((constructor)) static void keep(void) {
    const char *rank = getenv("RANK"), *kept = getenv("KEPT_RANK"), *once = getenv("KEPT_ONCE");
    if (!rank || !kept || strcmp(rank, kept)) return;
    if (once && open(once, O_CREAT | O_EXCL, 0600) < 0) return;
    if (getenv("KEPT_ENDS")) _exit(0);
    if (getenv("KEPT_ASLEEP")) sleep(atoi(getenv("KEPT_ASLEEP")));
    else raise(SIGSTOP);
}
"#;

fn job(folder: &Folder, rank: &str, more: &[&str]) -> Command {
    let kernels = c_library(
        folder,
        "library",
        KEEPS_A_RANK,
        &["plugins/median/median.c"],
    );
    let input = folder.write("in.y4m", &video(32, 32, "mono", 8));
    let mut command = pp(&["run", "--output", "-", "--input"]);
    command.arg(input).arg("--kernels").arg(kernels).args(more);
    command.env("KEPT_RANK", rank);
    command
}

#[test]
fn a_rank_that_is_stopped_before_the_ranks_have_met_is_missed() {
    for rank in ["0", "1"] {
        let folder = folder(&format!("missed_{rank}"));
        let words = ["timed out", &format!("rank {rank}"), "no sign of life"];
        run(&mut job(&folder, rank, &[]), None).failed(9, &words);
    }
}

#[test]
fn a_rank_that_is_stopped_before_the_ranks_have_met_is_replaced() {
    let folder = folder("missed_replaced");
    let calm = run(&mut job(&folder, "2", &[]), None).succeeded();
    let mut command = job(&folder, "1", &["--restarts", "1"]);
    command.env("KEPT_ONCE", folder.file("once"));
    let ended = run(&mut command, None).succeeded();
    assert!(
        ended.stdout == calm.stdout,
        "the film is another: {}",
        ended.stderr
    );
    // Without a restart left it is the end.
    run(&mut job(&folder, "1", &["--restarts", "1"]), None)
        .failed(9, &["rank 1", "1 of 1 restarts"]);
}

#[test]
fn a_rank_that_loads_for_long_is_waited_for() {
    let folder = folder("missed_none");
    let mut command = job(&folder, "1", &[]);
    // Longer than a rank may be silent.
    run(command.env("KEPT_ASLEEP", "7"), None).succeeded();
}

#[test]
fn a_rank_0_that_a_plugin_ends_with_success_is_no_success() {
    let folder = folder("missed_ends");
    let words = ["peer died", "rank 0", "before its work was done"];
    run(job(&folder, "0", &[]).env("KEPT_ENDS", "1"), None).failed(7, &words);
}
