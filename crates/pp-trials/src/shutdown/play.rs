//! One cell of two ranks from its beginning to its end: start the ranks, bring them into the state, do it, and
//! take the times.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use pp_contract::Pipeline;
use pp_job::command_line::NOTICED;
use pp_runtime::clock::now_ns;
use pp_testing::net::Net;
use pp_testing::process::Process;
use rustix::process::Signal;

use super::cell::{Cell, Event, Side, Wish};
use super::launch::{FILM, GATE};
use super::ranks::{ENDS_WITHIN, REACHED_WITHIN, Ranks, SETTLES};
use super::scene::Scene;
use crate::trial::{Ended, Ground};

/// Between two interrupts of an abort.
const APART: Duration = Duration::from_millis(15);

/// What was seen of a cell.
#[derive(Clone, Debug, Default)]
pub(super) struct Played {
    /// How we and the peer ended; the supervisor alone where there is one.
    pub(super) ended: Vec<Ended>,
    pub(super) times: Seen,
    /// What was left of the job.
    pub(super) left: Vec<String>,
}

/// The times of a cell.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// From the event to the moment at which we knew of a fault.
    pub(super) noticed: Option<Duration>,
    /// From the event to our end.
    pub(super) gone: Option<Duration>,
    /// From the event to the end of the last rank that can end.
    pub(super) all_gone: Option<Duration>,
    /// From the moment at which a peer that was stopped goes on to its end.
    pub(super) resumed: Option<Duration>,
}

/// Why there is nothing to tell of a cell.
#[derive(Clone, Debug)]
pub(super) enum Unplayed {
    /// It cannot be here.
    NotHere(String),
    /// It should have been, and the state was not reached.
    NotReached(String),
}

/// Plays one cell.
pub(super) fn play(
    cell: Cell,
    pipeline: &Pipeline,
    ground: Ground,
    folder: &Path,
    no_networks: &OnceLock<String>,
) -> Result<Played, Unplayed> {
    let may_fail = cell.event == Event::Cut && ground == Ground::Gpus;
    if let Some(why) = no_networks.get().filter(|_| may_fail) {
        return Err(Unplayed::NotHere(why.clone()));
    }
    let scene = Scene::of(cell, ground);
    let net = match cell.event {
        Event::Cut => Some(Net::new().map_err(Unplayed::NotHere)?),
        _ => None,
    };
    let how = (pipeline, cell.supervised);
    let ranks = Ranks::start(&scene, how, net.as_ref(), ground, folder);
    let mut stage = Stage {
        cell,
        ranks: ranks.map_err(Unplayed::NotReached)?,
        net,
        folder: folder.to_owned(),
        held_since: None,
    };
    let played = stage.reach(&scene).map(|()| stage.act(&scene));
    played.map_err(|why| {
        let logs = stage.ranks.logs();
        if may_fail {
            // NCCL's own ways between two networks of one machine are not for us to mend.
            let said = Ended::of(stage.us());
            let why = format!("NCCL did not connect two networks of this machine: {why}; {said}");
            return Unplayed::NotHere(no_networks.get_or_init(|| why).clone());
        }
        Unplayed::NotReached(why + &logs)
    })
}

/// When a rank knew of a fault, counted from `began`: its log says it.
pub(super) fn noticed(rank: &Process, began: Instant) -> Option<Duration> {
    let began_ns = now_ns().saturating_sub(began.elapsed().as_nanos() as u64);
    let log = rank.log();
    let (_, line) = log.split_once(NOTICED)?;
    let (_, at) = line.split_once("at_ns=")?;
    let at_ns = at.split_whitespace().next()?.parse::<u64>().ok()?;
    Some(Duration::from_nanos(at_ns.saturating_sub(began_ns)))
}

/// The ranks of a cell, and what happens to them.
struct Stage {
    cell: Cell,
    ranks: Ranks,
    net: Option<Net>,
    folder: PathBuf,
    /// The peer was stopped to come into the state.
    held_since: Option<Instant>,
}

impl Stage {
    /// Us: the rank, or the supervisor of both.
    fn us(&self) -> &Process {
        self.ranks.voice(self.cell.side.rank())
    }

    /// Brings the ranks into the state.
    fn reach(&mut self, scene: &Scene) -> Result<(), String> {
        let deadline = Instant::now() + REACHED_WITHIN;
        let ends = self.cell.restarts();
        if scene.chunks > 0 {
            self.ranks.give(scene.chunks, scene.and_half, true, ends);
        }
        for (count, sign) in scene.signs.iter().enumerate() {
            self.ranks.await_sign(sign, deadline)?;
            if count == 0 && scene.later > 0 {
                self.ranks.give(scene.later, false, false, ends);
            }
            if count == 0 && scene.holds_peer {
                self.held_since = Some(Instant::now());
                self.ranks
                    .signal(self.cell.side.peer().rank(), Signal::STOP);
            }
        }
        if self.cell.event == Event::Left && scene.fault.as_deref().is_some_and(is_leave) {
            return Ok(());
        }
        std::thread::sleep(SETTLES);
        Ok(())
    }

    /// The event, the wish, and what comes of them.
    fn act(&mut self, scene: &Scene) -> Played {
        let mut played = Played::default();
        let began = self.happen(scene).unwrap_or_else(|(began, error)| {
            played.left.push(error);
            began
        });
        match self.cell.wish {
            Wish::GoOn => {}
            Wish::Drain => self.drain(),
            Wish::Abort => {
                // Two that come before the process has run again are one: as a person would, again.
                while Instant::now() < began + ENDS_WITHIN {
                    self.us().signal(Signal::INT);
                    if self.us().ends_by(Instant::now() + APART) {
                        break;
                    }
                }
            }
        }
        let deadline = began + ENDS_WITHIN;
        let ours = self.us().ends(deadline);
        let since = |at: Instant| at.saturating_duration_since(began);
        played.times.gone = ours.map(|(at, _)| since(at));
        played.times.noticed = self.noticed(began);
        played.ended.push(Ended::of(self.us()));
        if scene.restarts {
            // How long it goes on is the work's affair.
            played.left.extend(self.wrong_film(scene));
        } else if self.cell.supervised {
            played.times.all_gone = self.ranks.until_all_gone(deadline).map(since);
        } else {
            self.end_of_peer(&mut played, began, deadline);
        }
        played.left.extend(self.ranks.left());
        played.left.extend(self.ranks.say_twice());
        played
    }

    /// Lets the peer do its thing; since when it has.
    fn happen(&self, scene: &Scene) -> Result<Instant, (Instant, String)> {
        let peer = self.cell.side.peer().rank();
        let began = Instant::now();
        match self.cell.event {
            Event::Computing => {}
            Event::Left if scene.fault.as_deref().is_some_and(is_leave) => {
                let deadline = began + REACHED_WITHIN;
                // It has left when its process has ended: what a driver does at exit takes time.
                let left = self.ranks.voice(peer).ends(deadline).map(|(at, _)| at);
                return left.ok_or((began, "the peer never left".into()));
            }
            Event::Left => self.ranks.signal(peer, Signal::INT),
            Event::Killed => {
                self.ranks.signal(peer, Signal::KILL);
                // For the rank that replaces it.
                let _ = std::fs::remove_file(self.folder.join(GATE));
            }
            Event::Stopped => {
                self.ranks.signal(peer, Signal::STOP);
                return Ok(self.held_since.unwrap_or(began));
            }
            Event::Cut => {
                let cut = self.net.as_ref().map_or(Ok(()), Net::cut);
                cut.map_err(|error| (began, error))?;
            }
        }
        if scene.holds_peer {
            self.ranks.signal(peer, Signal::CONT);
        }
        Ok(began)
    }

    /// One interrupt, as a user sends it who wants the job to end: to the stage's rank it means that the source
    /// is about to end the job, which it does if it can.
    fn drain(&self) {
        self.us().signal(Signal::INT);
        let peer_is_well = self.cell.event == Event::Computing && !self.cell.supervised;
        if peer_is_well && self.cell.side == Side::Stage {
            self.ranks.signal(Side::Source.rank(), Signal::INT);
        }
    }

    fn end_of_peer(&self, played: &mut Played, began: Instant, deadline: Instant) {
        let peer = self.ranks.voice(self.cell.side.peer().rank());
        if self.cell.event == Event::Stopped {
            // It cannot end, and keeps no other from it: what it does when it goes on is looked at then.
            played.times.all_gone = played.times.gone;
            let resumed = Instant::now();
            peer.signal(Signal::CONT);
            let ended = peer.ends(deadline);
            played.times.resumed = ended.map(|(at, _)| at.saturating_duration_since(resumed));
        } else {
            let ended = peer.ends(deadline);
            let at = ended.map(|(at, _)| at.saturating_duration_since(began));
            played.times.all_gone = at.zip(played.times.gone).map(|(peer, us)| peer.max(us));
        }
        played.ended.push(Ended::of(peer));
    }

    /// When we knew of a fault: our log says it.
    fn noticed(&self, began: Instant) -> Option<Duration> {
        noticed(self.us(), began)
    }

    /// The output has to be the input, since the job changes no frame.
    fn wrong_film(&self, scene: &Scene) -> Option<String> {
        let mut input = scene.picture.header();
        let frames = scene.chunks * scene.picture.frames_per_chunk;
        input.extend(scene.picture.frame().repeat(frames));
        let film = std::fs::read(self.folder.join(FILM));
        (film.ok() != Some(input)).then(|| "another film than the input".into())
    }
}

fn is_leave(fault: &str) -> bool {
    fault.starts_with("leave")
}
