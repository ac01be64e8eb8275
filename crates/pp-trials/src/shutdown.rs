//! `pp-trials shutdown`: every state of ours against everything that may become of the peer.
//!
//! Hazard: a shutdown works whenever one tries it, and hangs in the one state that was never
//! tried. Guarantee: each cell is real processes of this very program in the state that its name
//! says, seen to be there by a sign and not by a guess; how it ended, how long that took and what
//! was left is measured from outside.
//!
//! Two ranks have every state and every event; three in a row have the few that more ranks make different.

mod cell;
mod chain;
mod judge;
mod launch;
mod play;
mod ranks;
mod scene;

use std::sync::OnceLock;

use pp_command::env::Env;
use pp_contract::Pipeline;
use pp_job::{Config, Error};

use self::cell::{Cell, Event};
use self::chain::Link;
use self::play::{Unplayed, play};
use self::scene::Scene;
use crate::trial::{CHAIN, Ground, TWO, Told, Trial, TrialArgs};

/// A cell of the matrix.
enum Any {
    Two(Cell),
    Chain(Link),
}

impl Trial for Any {
    fn name(&self) -> String {
        match self {
            Self::Two(cell) => cell.to_string(),
            Self::Chain(link) => link.to_string(),
        }
    }

    /// Each two words that stand side by side: who and state, state and event, event and wish.
    fn features(&self) -> Vec<String> {
        let name = self.name();
        let words: Vec<_> = name.split('/').collect();
        words.windows(2).map(|two| two.join("/")).collect()
    }

    fn means(&self, ground: Ground) -> String {
        match self {
            Self::Two(cell) => Scene::of(*cell, ground).means.into(),
            Self::Chain(link) => link.means().into(),
        }
    }

    fn not_here(&self, ground: Ground) -> Option<&'static str> {
        match self {
            Self::Two(cell) if cell.event == Event::Cut && !ground.has_nccl() => {
                Some("the ranks share memory on one host: there is no network between them")
            }
            Self::Two(cell)
                if cell.supervised
                    && ground.has_nccl()
                    && !ground.has_gpus(&pipeline(TWO), cell.supervised) =>
            {
                Some("a supervisor's ranks are on one host, where NCCL wants a GPU for each")
            }
            Self::Chain(_) if !ground.has_gpus(&pipeline(CHAIN), false) => {
                Some("there are no three GPUs for three ranks")
            }
            _ => None,
        }
    }
}

fn pipeline(text: &str) -> Pipeline {
    text.parse().expect("a pipeline of ours")
}

/// Runs the matrix.
pub(crate) fn shutdown(args: &TrialArgs, env: &Env) -> Result<(), Error> {
    let ground = args.ground();
    // The ranks read the other settings.
    let heartbeat = |name: &str| env.get(name).filter(|_| name == "PP_HEARTBEAT_MS");
    let heartbeat = Config::alone(heartbeat)?.heartbeat.ok_or_else(|| {
        Error::Usage("PP_HEARTBEAT_MS=0: without heartbeats no rank notices a stop".into())
    })?;
    let [two, chain] = [TWO, CHAIN].map(pipeline);
    // Why ranks in networks of their own do not come up here, once one has not.
    let no_networks = OnceLock::new();
    let play_two =
        |cell, folder: &_, told: &mut Told| match play(cell, &two, ground, folder, &no_networks) {
            Ok(played) => {
                told.wrong = judge::wrong(cell, ground, &played);
                told.times = judge::times(cell, ground, heartbeat, &played);
                let whose = ["we", "the peer"].iter().zip(&played.ended);
                told.ended = whose.map(|(who, ended)| format!("{who} {ended}")).collect();
            }
            Err(Unplayed::NotHere(why)) => told.not_run = Some(why),
            Err(Unplayed::NotReached(why)) => {
                told.wrong = vec![format!("the state was not reached: {why}")];
            }
        };
    let cells = Cell::all(ground).into_iter().map(Any::Two);
    let cells = cells.chain(Link::all().map(Any::Chain)).collect();
    args.run(
        "cells",
        ground.fewest_gpus(&two, false),
        cells,
        |cell, folder, told| match *cell {
            Any::Two(cell) => play_two(cell, folder, told),
            Any::Chain(link) => link.play(&chain, ground, heartbeat, folder, told),
        },
    )
}
