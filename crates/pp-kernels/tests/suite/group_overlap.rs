//! The chunks of a group overlap, on a driver that is not real: a gather that waits for the leader holds up neither the
//! passes over the next chunk nor its scatter.

use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use pp_fakes::raw::{Config, Handle, UniqueId, device};
use pp_fakes::{Fakes, ok, raw};
use pp_kernels::{
    Chroma, ChunkShape, Collectives, DType, Failure, KernelSet, Payload, PayloadMut, SessionConfig,
    Space, VideoPlanParts,
};

/// Far enough away that only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

/// A word to the other member, or from it.
struct Word {
    comm: Handle,
    at: u64,
}

impl Word {
    fn join(id: UniqueId, rank: i32) -> Self {
        let (mut comm, mut at) = (std::ptr::null_mut(), 0);
        ok!(comm_init(&mut comm, 2, id, rank, &Config::new(true)));
        ok!(alloc(&mut at, 1));
        Self { comm, at }
    }

    fn tell(&self, stream: Handle) {
        ok!(fill(self.at, 0, 1, stream));
        ok!(send(self.at, 1, 1, 1, self.comm, stream));
    }

    fn hear(&self, stream: Handle) {
        ok!(recv(self.at, 1, 1, 0, self.comm, stream));
    }
}

/// A leader that takes the first results when it is told to.
fn lead(id: UniqueId, told: &Receiver<()>) {
    let (_, stream) = device(0);
    let word = Word::join(id, 0);
    // The first connects the two, for which the thread waits.
    word.tell(stream);
    told.recv().unwrap();
    word.tell(stream);
    ok!(stream_synchronize(stream));
}

/// What the other member does with the collectives: each part is zeros, and the first gather waits for a word of the leader.
struct Member {
    stream: Handle,
    results: Handle,
    word: Word,
    gathers: u32,
}

fn not_called<T>() -> Result<T, Failure> {
    Err(Failure::error("one pass of two members needs no such call"))
}

impl Collectives for Member {
    unsafe fn scatter(
        &mut self,
        _: *const u8,
        bytes: &[u64],
        to: *mut u8,
        _: u32,
    ) -> Result<(), Failure> {
        ok!(fill(to.addr() as u64, 0, bytes[1] as usize, self.stream));
        Ok(())
    }

    unsafe fn gather(
        &mut self,
        _: *const u8,
        _: &[u64],
        _: *mut u8,
        _: u32,
    ) -> Result<(), Failure> {
        if self.gathers == 0 {
            self.word.hear(self.results);
        }
        self.gathers += 1;
        Ok(())
    }

    unsafe fn broadcast(&mut self, _: *mut u8, _: u64, _: u32) -> Result<(), Failure> {
        not_called()
    }

    unsafe fn all_reduce_sum(&mut self, _: *mut u8, _: u64, _: DType) -> Result<(), Failure> {
        not_called()
    }

    unsafe fn send(&mut self, _: *const u8, _: u64, _: u32) -> Result<(), Failure> {
        not_called()
    }

    unsafe fn receive(&mut self, _: *mut u8, _: u64, _: u32) -> Result<(), Failure> {
        not_called()
    }

    fn barrier(&mut self) -> Result<(), Failure> {
        not_called()
    }
}

#[test]
fn the_passes_over_the_next_chunk_begin_before_the_results_are_sent() {
    if !pp_testing::alone!() {
        return;
    }
    Fakes::newest().load().set("DEVICES", "2");
    let mut id = [0; 128];
    ok!(unique_id(&mut id));
    let (tell, told) = channel();
    let leader = std::thread::spawn(move || lead(id, &told));

    let (context, stream) = device(1);
    let word = Word::join(id, 1);
    word.hear(stream);
    ok!(stream_synchronize(stream));
    let config = SessionConfig {
        member: 1,
        members: 2,
        space: Space::Cuda {
            context: context as u64,
            stream: stream as u64,
        },
        noise_sigma: Some(12.0),
        ..SessionConfig::host(32, 400, Chroma::Mono, 2)
    };
    // SAFETY: the context is current on this thread, and lives as long as the process, with its stream.
    let session = unsafe { KernelSet::for_device().open_stage_on_device("phase_b", &config, &[]) };
    let mut session = session.unwrap();
    let results = session.results().expect("a group has a stream for results");
    let mut member = Member {
        stream,
        results: results.raw() as Handle,
        word,
        gathers: 0,
    };
    let shape = ChunkShape {
        frames: 2,
        steps: 1,
        context_frames: 0,
    };
    let layout = session.layout(shape, 0).unwrap();
    let first = VideoPlanParts::first(config.width, config.height, shape.steps);
    for plan in [first, first.following(2, false)] {
        let (from, mut to) = (
            Payload::of_leader(&layout.inputs),
            PayloadMut::of_leader(&layout.outputs),
        );
        // SAFETY: there is no payload; the collectives use the streams of the session.
        unsafe { session.run(&plan, 0, &from, &mut to, Some(&mut member)) }.unwrap();
    }
    // It is behind what the second pass reads, which is behind the first pass, and behind the last use of its room.
    let deadline = Instant::now() + HANG;
    while raw!(stream_query(stream)) != 0 {
        assert!(
            Instant::now() < deadline,
            "a gather holds up the next chunk"
        );
        std::thread::yield_now();
    }
    assert!(!results.is_idle().unwrap(), "the gather did not wait");
    tell.send(()).unwrap();
    ok!(stream_synchronize(member.results));
    assert_eq!(member.gathers, 2);
    leader.join().unwrap();
}
