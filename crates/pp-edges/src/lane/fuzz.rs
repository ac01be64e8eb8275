//! The lane's messages over the control channel, run on any bytes: see [`crate::fuzz`].

use super::*;
use pp_meet::control::fuzz::channel;
use pp_words::fuzz::Script;

/// The edges of the lane, and their slots.
const OUT: u32 = 1;
const IN: u32 = 0;
const DEPTH: u32 = 3;

/// What a peer on another host says on the lane, between what this side does meanwhile.
pub fn lane(bytes: &[u8]) {
    let before = threads();
    run(bytes);
    // What the thread of a lane still holds when it ends would be taken for a leak.
    while threads() > before {
        std::thread::yield_now();
    }
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

fn run(bytes: &[u8]) {
    thread_local! {
        static BELL: Bell = Bell::new().expect("a bell");
    }
    let (channel, mut peer) = channel();
    let bell = BELL.with(Clone::clone);
    let sender = channel.sender().clone();
    let shape = EdgeShape {
        depth: DEPTH,
        slot_bytes: 1,
    };
    let edge = |edge, is_sender| EdgeEnd {
        edge,
        shape,
        is_sender,
    };
    let (ends, inlet) = over_channel(sender, bell, &[edge(OUT, true), edge(IN, false)])
        .expect("a depth that there can be");
    let Ok([LaneEnd::Out(out), LaneEnd::In(mut incoming)]) = <[LaneEnd; 2]>::try_from(ends) else {
        panic!("the ends are those of the edges");
    };
    let mut script = Script::new(bytes);
    let (mut taken, mut leased, mut sent) = (Vec::new(), Vec::new(), Vec::new());
    let mut inbox = Vec::new();
    while !script.is_over() {
        let step = script.byte();
        match step % 8 {
            0..=2 => {
                if inlet.deliver(&message(&mut script, step)).is_err() {
                    // The job would end here.
                    return;
                }
            }
            3 => match incoming.poll(&mut inbox) {
                Ok(true) => {
                    assert!(inbox.len() <= MAX_FRAME_BYTES);
                    let slot = incoming.announced;
                    if incoming.slots.take(slot).is_ok() {
                        assert!(slot < DEPTH && !taken.contains(&slot), "read twice");
                        taken.push(slot);
                    }
                }
                Ok(false) => {}
                Err(_) => return,
            },
            4 => {
                if let Some(slot) = taken.pop() {
                    incoming.slots.give_back(slot);
                }
            }
            5 => {
                if let Some(slot) = out.slots.lease() {
                    assert!(!leased.contains(&slot) && !sent.contains(&slot));
                    leased.push(slot);
                }
            }
            6 => {
                if let Some(slot) = leased.pop() {
                    out.slots.submit(slot);
                    sent.push(slot);
                }
            }
            _ => {
                if let Some(slot) = sent.pop() {
                    match out.slots.has_come_back(slot) {
                        Ok(true) => {
                            out.slots.redeem(slot);
                            out.slots.give_up(slot);
                        }
                        Ok(false) if step >= 128 => out.slots.orphan(slot),
                        Ok(false) => sent.push(slot),
                        Err(_) => panic!("no peer writes these words"),
                    }
                }
            }
        }
        let held = taken.len() as u32;
        assert_eq!(incoming.slots.taken.load(Ordering::Relaxed), held);
        let _ = incoming.slots.has_untaken();
        // The peer reads, or the lane would rightly break.
        let mut drained = [0; 4096];
        let _ = std::io::Read::read(&mut peer, &mut drained);
    }
}

/// A message of the lane: of its form, or of none.
fn message(script: &mut Script<'_>, step: u8) -> Vec<u8> {
    let tag = script.byte();
    let mut body = vec![tag % 4];
    // An honest peer's edge, for a tag that says no other.
    let edge = match tag / 64 {
        0 if tag % 4 == 2 => OUT,
        0 => IN,
        other => u32::from(other) - 1,
    };
    body.extend_from_slice(&edge.to_le_bytes());
    body.extend_from_slice(&u32::from(script.byte() % 5).to_le_bytes());
    if step >= 128 {
        body.clear();
    }
    let count = usize::from(script.byte());
    body.extend_from_slice(script.bytes(count));
    body
}
