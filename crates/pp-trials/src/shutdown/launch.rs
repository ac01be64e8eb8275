//! What the processes of a cell are started with.

use std::path::Path;
use std::process::Command;

use pp_testing::net;

use super::scene::{Picture, Scene};
use crate::hook::VARIABLE;
use crate::trial::Ground;

/// Calls of the stand-ins wait while this file is there, and then the other one is, too.
pub(super) const GATE: &str = "gate";
pub(super) const AT_GATE: &str = "gate.reached";
/// Where the output goes that is compared.
pub(super) const FILM: &str = "film.y4m";
/// What signs are read from.
const LOG: &str = "error,pp_runtime=debug,pp_transport::control=debug";

/// What every rank of a cell is started with.
pub(super) fn prepare(command: &mut Command, scene: &Scene, ground: Ground, folder: &Path) {
    let Picture {
        frames_per_chunk, ..
    } = scene.picture;
    command.args(["--input", "-", "--cuts", "off", "--output"]);
    if scene.restarts {
        command.arg(folder.join(FILM)).args(["--restarts", "1"]);
    } else {
        command.arg("-");
    }
    command.args(["--denoise-steps", "0"]);
    command.args(["--frames-per-chunk", &frames_per_chunk.to_string()]);
    command.args(["--depth", &scene.depth.to_string()]);
    command.env("PP_LOG", LOG);
    if let Some(fault) = &scene.fault {
        command.env(VARIABLE, fault);
    }
    if let Some(ms) = scene.stuck_ms {
        command.env("PP_STUCK_MS", ms.to_string());
    }
    if ground == Ground::Fakes {
        command.env("PP_FAKE_GATE", folder.join(GATE));
        // Every send waits for its receiver.
        command.env("PP_FAKE_NCCL_EAGER", "0");
    }
}

/// As between two machines.
pub(super) fn over_tcp(command: &mut Command, ground: Ground) {
    command
        .env("MASTER_ADDR", net::ADDRESSES[0])
        .env("MASTER_PORT", "29555")
        .env("PP_RENDEZVOUS", "tcp");
    if ground == Ground::Gpus {
        command.env("NCCL_SOCKET_IFNAME", format!("={}", net::DEVICE));
    }
}
