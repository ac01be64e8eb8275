//! Every interleaving of small pipelines: both cores, two lanes, slots, a source and a drain.
//!
//! The world below delivers frames and carries out actions in every possible order. A state that
//! was seen is not walked again, so the walk is complete and ends. What is checked in every
//! state: in flight and slots within the depth, output in order, nothing decoded twice or after
//! its epoch ended. At every dead end: both sides finished and every admitted chunk accounted for.

use std::collections::{HashSet, VecDeque};

use pp_contract::{CacheEpoch, ChunkIndex};
use pp_runtime::core::{Cut, Facts, FrontAction, FrontCore, PhaseBAction, PhaseBCore};

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Frame {
    Chunk(ChunkIndex, CacheEpoch),
    Shutdown,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    front: FrontCore,
    back: PhaseBCore,
    to_back: VecDeque<Frame>,
    to_front: VecDeque<Frame>,
    /// Chunks queued at Phase B, oldest first, and those that are being computed.
    at_back: VecDeque<(ChunkIndex, CacheEpoch)>,
    computing: VecDeque<(ChunkIndex, CacheEpoch)>,
    forward_slots: u32,
    backward_slots: u32,
    script: VecDeque<Cut>,
    may_drain: bool,
    /// The highest epoch that has left the front.
    newest_epoch: CacheEpoch,
    /// Epochs of results waiting at the front, oldest first.
    returned: VecDeque<(ChunkIndex, CacheEpoch)>,
    /// Decodes under way, oldest first.
    decoding: VecDeque<ChunkIndex>,
    emitted: Vec<ChunkIndex>,
    finished: (bool, bool),
}

impl World {
    fn new(depth: u32, slots: u32, script: &[Cut], may_drain: bool) -> Self {
        Self {
            front: FrontCore::new(depth),
            back: PhaseBCore::new(depth),
            to_back: VecDeque::new(),
            to_front: VecDeque::new(),
            at_back: VecDeque::new(),
            computing: VecDeque::new(),
            decoding: VecDeque::new(),
            forward_slots: slots,
            backward_slots: slots,
            script: script.iter().copied().collect(),
            may_drain,
            newest_epoch: CacheEpoch::new(0),
            returned: VecDeque::new(),
            emitted: Vec::new(),
            finished: (false, false),
        }
    }

    fn after(&self, step: impl FnOnce(&mut Self)) -> Self {
        let mut next = self.clone();
        step(&mut next);
        next
    }

    /// All worlds one step away.
    fn next(&self) -> Vec<Self> {
        let mut worlds = Vec::new();
        if self.front.wants_offer() {
            worlds.push(self.after(|w| match w.script.pop_front() {
                Some(cut) => w.front.handle_offer(cut),
                None => w.front.handle_source_end(),
            }));
        }
        if self.may_drain {
            worlds.push(self.after(|w| {
                w.may_drain = false;
                w.front.handle_drain();
            }));
        }
        // The sink may or may not be ready at this moment.
        for sink_ready in [true, false] {
            let facts = Facts {
                credit: self.forward_slots > 0,
                sink_ready,
            };
            let action = self.front.poll(facts);
            if action != FrontAction::Wait && !self.finished.0 {
                worlds.push(self.after(|w| w.act_front(action)));
            }
        }
        let action = self.back.poll(self.backward_slots > 0);
        if action != PhaseBAction::Wait && !self.finished.1 {
            worlds.push(self.after(|w| w.act_back(action)));
        }
        // A device may end its work at any moment.
        if !self.computing.is_empty() {
            worlds.push(self.after(|w| {
                let (chunk, epoch) = w.computing.pop_front().unwrap();
                w.to_front.push_back(Frame::Chunk(chunk, epoch));
                w.back.handle_answered();
            }));
        }
        if !self.decoding.is_empty() {
            worlds.push(self.after(|w| {
                w.emitted.push(w.decoding.pop_front().unwrap());
                w.front.handle_decoded();
            }));
        }
        if !self.to_back.is_empty() {
            worlds.push(self.after(|w| match w.to_back.pop_front().unwrap() {
                Frame::Chunk(chunk, epoch) => {
                    w.back.handle_envelope(chunk).unwrap();
                    w.at_back.push_back((chunk, epoch));
                }
                Frame::Shutdown => w.back.handle_shutdown(),
            }));
        }
        if !self.to_front.is_empty() {
            worlds.push(self.after(|w| match w.to_front.pop_front().unwrap() {
                Frame::Chunk(chunk, epoch) => {
                    w.front.handle_result(chunk, epoch).unwrap();
                    w.returned.push_back((chunk, epoch));
                }
                Frame::Shutdown => assert!(w.front.handle_peer_closed()),
            }));
        }
        worlds
    }

    fn act_front(&mut self, action: FrontAction) {
        match action {
            FrontAction::Build { chunk, epoch, .. } => {
                self.forward_slots -= 1;
                self.newest_epoch = self.newest_epoch.max(epoch);
                self.to_back.push_back(Frame::Chunk(chunk, epoch));
                self.front.handle_sent(chunk, epoch);
            }
            FrontAction::Decode { chunk } => {
                let (returned, epoch) = self.returned.pop_front().unwrap();
                assert_eq!(returned, chunk);
                assert_eq!(epoch, self.newest_epoch, "decoded after its epoch ended");
                self.decoding.push_back(chunk);
                self.backward_slots += 1;
                self.front.handle_decode_started();
            }
            FrontAction::Drop { chunk } => {
                let (returned, epoch) = self.returned.pop_front().unwrap();
                assert_eq!(returned, chunk);
                assert!(
                    epoch < self.newest_epoch,
                    "dropped though its epoch is current"
                );
                self.backward_slots += 1;
                self.front.handle_dropped();
            }
            FrontAction::SendShutdown => {
                self.to_back.push_back(Frame::Shutdown);
                self.front.handle_shutdown_sent();
            }
            FrontAction::Finish => self.finished.0 = true,
            FrontAction::SendAgain { .. } | FrontAction::Wait => unreachable!(),
        }
    }

    fn act_back(&mut self, action: PhaseBAction) {
        match action {
            PhaseBAction::Compute { chunk } => {
                self.backward_slots -= 1;
                self.forward_slots += 1;
                let next = self.at_back.pop_front().unwrap();
                assert_eq!(next.0, chunk);
                self.computing.push_back(next);
                self.back.handle_started();
            }
            PhaseBAction::AnswerShutdown => {
                self.to_front.push_back(Frame::Shutdown);
                self.back.handle_shutdown_answered();
            }
            PhaseBAction::Finish => self.finished.1 = true,
            PhaseBAction::Wait => unreachable!(),
        }
    }

    fn check(&self, depth: u32) {
        assert!(self.front.in_flight() <= depth);
        assert!(self.front.counts().max_in_flight <= depth);
        assert!(self.back.unanswered() <= depth);
        assert_eq!(self.front.decoding(), self.decoding.len());
        assert!(self.emitted.windows(2).all(|pair| pair[0] < pair[1]));
    }

    fn check_end(&self, script: &[Cut], drained: bool) {
        assert_eq!(self.finished, (true, true), "both sides wait for ever");
        let counts = self.front.counts();
        assert_eq!(counts.admitted, counts.emitted + counts.dropped);
        assert_eq!(counts.emitted, self.emitted.len() as u64);
        assert!(self.computing.is_empty() && self.decoding.is_empty() && self.at_back.is_empty());
        assert!(self.to_back.is_empty() && self.to_front.is_empty() && self.returned.is_empty());
        if !drained {
            assert_eq!(
                counts.admitted,
                script.len() as u64,
                "a chunk was never admitted"
            );
        }
        if !script.contains(&Cut::Hard) {
            assert_eq!(counts.dropped, 0, "a chunk was lost without a hard cut");
        }
    }
}

/// Walks everything reachable; gives the number of states and of distinct ends.
fn explore(depth: u32, slots: u32, script: &[Cut], may_drain: bool) -> (usize, usize) {
    let mut seen = HashSet::new();
    let mut ends = 0;
    let mut open = vec![World::new(depth, slots, script, may_drain)];
    while let Some(world) = open.pop() {
        if !seen.insert(world.clone()) {
            continue;
        }
        world.check(depth);
        let next = world.next();
        // A drain may come at any time or never: an end without it is an end too.
        if next.is_empty() || (next.len() == 1 && world.may_drain && world.finished == (true, true))
        {
            ends += 1;
            world.check_end(script, may_drain && !world.may_drain);
        }
        open.extend(next);
    }
    (seen.len(), ends)
}

/// All scripts of `len` cuts.
fn scripts(len: usize) -> Vec<Vec<Cut>> {
    let mut all = vec![Vec::new()];
    for _ in 0..len {
        all = all
            .into_iter()
            .flat_map(|script: Vec<Cut>| {
                [Cut::None, Cut::Flush, Cut::Hard].map(|cut| {
                    let mut longer = script.clone();
                    longer.push(cut);
                    longer
                })
            })
            .collect();
    }
    all
}

#[test]
fn every_interleaving_of_small_pipelines_ends_well() {
    let mut states = 0;
    let mut ends = 0;
    for len in 0..=4 {
        for script in scripts(len) {
            for depth in 1..=3 {
                for may_drain in [false, true] {
                    let (seen, ended) = explore(depth, depth, &script, may_drain);
                    states += seen;
                    ends += ended;
                }
            }
        }
    }
    assert!(
        states > 100_000,
        "the walk is not complete: {states} states"
    );
    assert!(ends > 500, "{ends} ends");
}

#[test]
fn fewer_slots_than_the_depth_slow_down_but_never_stop() {
    for script in scripts(3) {
        for slots in 1..3 {
            explore(4, slots, &script, true);
        }
    }
}

#[test]
fn a_hard_cut_drops_exactly_what_was_in_flight() {
    // Depth 3: two chunks leave, then the cut; both come back stale.
    let mut world = World::new(3, 3, &[Cut::None, Cut::None, Cut::Hard], false);
    let facts = Facts {
        credit: true,
        sink_ready: true,
    };
    for _ in 0..3 {
        let cut = world.script.pop_front().unwrap();
        world.front.handle_offer(cut);
        let action = world.front.poll(facts);
        world.act_front(action);
    }
    for chunk in 0..3 {
        let epoch = CacheEpoch::new(u64::from(chunk == 2));
        world
            .front
            .handle_result(ChunkIndex::new(chunk), epoch)
            .unwrap();
    }
    world.front.handle_source_end();
    let drop = |chunk| FrontAction::Drop {
        chunk: ChunkIndex::new(chunk),
    };
    assert_eq!(world.front.poll(facts), drop(0));
    world.front.handle_dropped();
    assert_eq!(world.front.poll(facts), drop(1));
    world.front.handle_dropped();
    let chunk = ChunkIndex::new(2);
    assert_eq!(world.front.poll(facts), FrontAction::Decode { chunk });
}

#[test]
fn a_result_that_was_not_due_is_refused() {
    let mut front = FrontCore::new(2);
    let error = front.handle_result(ChunkIndex::new(7), CacheEpoch::new(0));
    assert!(
        error
            .unwrap_err()
            .to_string()
            .ends_with("where nothing was due")
    );
    front.handle_offer(Cut::None);
    front.handle_sent(ChunkIndex::new(0), CacheEpoch::new(0));
    let error = front.handle_result(ChunkIndex::new(0), CacheEpoch::new(1));
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("chunk 0 of epoch 0 was due")
    );
}

#[test]
fn phase_b_refuses_more_than_the_depth() {
    let mut back = PhaseBCore::new(1);
    back.handle_envelope(ChunkIndex::new(0)).unwrap();
    assert!(back.handle_envelope(ChunkIndex::new(1)).is_err());
}
