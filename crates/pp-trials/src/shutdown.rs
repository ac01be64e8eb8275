//! `pp-trials shutdown`: every state of ours against everything that may become of the peer.
//!
//! Hazard: a shutdown works whenever one tries it, and hangs in the one state that was never
//! tried. Guarantee: each cell is real processes of this very program in the state that its name
//! says, seen to be there by a sign and not by a guess; how it ended, how long that took and what
//! was left is measured from outside.

mod cell;
mod judge;
mod launch;
mod net;
mod play;
mod scene;

use std::sync::OnceLock;

use pp_cli::env::Env;
use pp_job::{Config, Error};

use self::cell::{Cell, Event};
use self::play::{Unplayed, play};
use self::scene::Scene;
use crate::trial::{Ground, Trial, TrialArgs};

impl Trial for Cell {
    fn name(&self) -> String {
        self.to_string()
    }

    fn means(&self, ground: Ground) -> String {
        Scene::of(*self, ground).means.into()
    }

    fn not_here(&self, ground: Ground) -> Option<&'static str> {
        (self.event == Event::Cut && ground.is_host())
            .then_some("the ranks share memory on one host: there is no network between them")
    }
}

/// Runs the matrix.
pub(crate) fn shutdown(args: &TrialArgs, env: &Env) -> Result<(), Error> {
    let ground = args.ground();
    // The ranks read the other settings.
    let heartbeat = |name: &str| env.get(name).filter(|_| name == "PP_HEARTBEAT_MS");
    let heartbeat = Config::alone(heartbeat)?.heartbeat.ok_or_else(|| {
        Error::Usage("PP_HEARTBEAT_MS=0: without heartbeats no rank notices a stop".into())
    })?;
    // Why ranks in networks of their own do not come up here, once one has not.
    let no_networks = OnceLock::new();
    args.run("cells", Cell::all(ground), |cell, folder, told| match play(
        *cell,
        ground,
        folder,
        &no_networks,
    ) {
        Ok(played) => {
            told.wrong = judge::wrong(*cell, ground, &played);
            told.times = judge::times(*cell, ground, heartbeat, played.times);
            let whose = ["we", "the peer"].iter().zip(&played.ended);
            told.ended = whose.map(|(who, ended)| format!("{who} {ended}")).collect();
        }
        Err(Unplayed::NotHere(why)) => told.not_run = Some(why),
        Err(Unplayed::NotReached(why)) => {
            told.wrong = vec![format!("the state was not reached: {why}")];
        }
    })
}
