//! The lane's messages over the control channel, run on any bytes: see [`crate::fuzz`].

use super::*;
use crate::control::fuzz::channel;
use crate::fuzz::script::Script;

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
    const DEPTH: u32 = 3;
    thread_local! {
        static BELL: Bell = Bell::new().expect("a bell");
    }
    let (channel, mut peer) = channel();
    let bell = BELL.with(Clone::clone);
    let sender = channel.sender().clone();
    let (mut lane, inlet) =
        Lane::over_channel(sender, bell, DEPTH, DEPTH).expect("a depth that there can be");
    let mut script = Script::new(bytes);
    let (mut taken, mut leased, mut sent) = (Vec::new(), Vec::new(), Vec::new());
    let mut inbox = Vec::new();
    while !script.is_over() {
        let step = script.byte();
        match step % 8 {
            // A message: of this form, or of none.
            0..=2 => {
                let mut body = vec![script.byte() % 4];
                body.extend_from_slice(&u32::from(script.byte() % 5).to_le_bytes());
                if step >= 128 {
                    body.clear();
                }
                let count = usize::from(script.byte());
                body.extend_from_slice(script.bytes(count));
                if inlet.deliver(&body).is_err() {
                    // The job would end here.
                    return;
                }
            }
            3 => match lane.poll(&mut inbox) {
                Ok(true) => {
                    assert!(inbox.len() <= MAX_FRAME_BYTES);
                    let slot = lane.announced;
                    if lane.incoming.take(slot).is_ok() {
                        assert!(slot < DEPTH && !taken.contains(&slot), "read twice");
                        taken.push(slot);
                    }
                }
                Ok(false) => {}
                Err(_) => return,
            },
            4 => {
                if let Some(slot) = taken.pop() {
                    lane.incoming.give_back(slot);
                }
            }
            5 => {
                if let Some(slot) = lane.out.lease() {
                    assert!(!leased.contains(&slot) && !sent.contains(&slot));
                    leased.push(slot);
                }
            }
            6 => {
                if let Some(slot) = leased.pop() {
                    lane.out.submit(slot);
                    sent.push(slot);
                }
            }
            _ => {
                if let Some(slot) = sent.pop() {
                    match lane.out.has_come_back(slot) {
                        Ok(true) => {
                            lane.out.redeem(slot);
                            lane.out.give_up(slot);
                        }
                        Ok(false) if step >= 128 => lane.out.orphan(slot),
                        Ok(false) => sent.push(slot),
                        Err(_) => panic!("no peer writes these words"),
                    }
                }
            }
        }
        let held = taken.len() as u32;
        assert_eq!(lane.incoming.taken.load(Ordering::Relaxed), held);
        let _ = lane.incoming.has_untaken();
        // The peer reads, or the lane would rightly break.
        let mut drained = [0; 4096];
        let _ = std::io::Read::read(&mut peer, &mut drained);
    }
}
