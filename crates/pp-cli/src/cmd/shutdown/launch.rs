//! How the processes of a cell are started.

use std::ffi::OsStr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use pp_transport::launch::LocalJob;
use rustix::process::Pid;

use super::cell::Ground;
use super::left;
use super::net;
use super::rank::Process;
use super::scene::{Picture, Scene};

/// The parts of a cell's folder: what ranks record, and where stand-ins meet.
pub(super) const FLIGHT: &str = "flight";
pub(super) const MEET: &str = "meet";
/// Calls of the stand-ins wait while this file is there, and then the other one is, too.
pub(super) const GATE: &str = "gate";
pub(super) const AT_GATE: &str = "gate.reached";
/// Where the film goes that is looked at.
pub(super) const FILM: &str = "film.y4m";
/// What signs are read from.
const LOG: &str = "error,pp_runtime=debug,pp_transport::control=debug";

/// Makes a folder of this user alone, as recordings want it.
pub(super) fn make_own(folder: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(folder)
}

/// What every rank of a cell is started with.
pub(super) fn prepare(command: &mut Command, scene: &Scene, ground: Ground, folder: &Path) {
    let Picture {
        frames_per_chunk, ..
    } = scene.picture;
    command.args(["run", "--input", "-", "--cuts", "off", "--output"]);
    if scene.restarts {
        command.arg(folder.join(FILM)).args(["--restarts", "1"]);
    } else {
        command.arg("-");
    }
    command.args(["--denoise-steps", "0", "--threads", "1"]);
    command.args(["--frames-per-chunk", &frames_per_chunk.to_string()]);
    command.args(["--depth", &scene.depth.to_string()]);
    command.args::<_, &OsStr>(match ground {
        Ground::Host => [
            "--transport".as_ref(),
            "host".as_ref(),
            "--kernels".as_ref(),
            "cpu".as_ref(),
        ],
        Ground::Fakes | Ground::Gpus => [
            "--transport".as_ref(),
            "nccl".as_ref(),
            "--kernels".as_ref(),
            "ptx".as_ref(),
        ],
    });
    for name in LocalJob::LAUNCHER_VARIABLES {
        command.env_remove(name);
    }
    command.env("PP_LOG", LOG);
    command.env_remove("PP_FAULT");
    if let Some(fault) = &scene.fault {
        command.env("PP_FAULT", fault);
    }
    if let Some(ms) = scene.stuck_ms {
        command.env("PP_STUCK_MS", ms.to_string());
    }
    command.env("PP_FLIGHT_DIR", folder.join(FLIGHT));
    if ground == Ground::Fakes {
        command.env("PP_FAKE_NCCL_DIR", folder.join(MEET));
        command.env("PP_FAKE_GATE", folder.join(GATE));
        // Every send waits for its receiver.
        command.env("PP_FAKE_NCCL_EAGER", "0");
    }
}

/// As between two machines.
pub(super) fn over_tcp(command: &mut Command, ground: Ground) {
    command
        .env("MASTER_ADDR", net::ADDRESS)
        .env("MASTER_PORT", "29555")
        .env("PP_RENDEZVOUS", "tcp");
    if ground == Ground::Gpus {
        command.env("NCCL_SOCKET_IFNAME", format!("={}", net::DEVICE));
    }
}

/// The ranks that a supervisor has started.
pub(super) fn ranks_of(supervisor: &Process, within: Duration) -> Result<[Pid; 2], String> {
    let deadline = Instant::now() + within;
    let own = supervisor.pid().as_raw_nonzero().get() as u32;
    while Instant::now() < deadline && supervisor.ended().is_none() {
        if let Some(ranks) = left::ranks_of(own) {
            let pid = |rank: u32| Pid::from_raw(rank as i32);
            if let (Some(front), Some(back)) = (pid(ranks[0]), pid(ranks[1])) {
                return Ok([front, back]);
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Err(format!(
        "the supervisor started no ranks: {}",
        supervisor.log()
    ))
}
