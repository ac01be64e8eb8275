//! The collectives of the transport's groups, as kernels call them.

use pp_contract::{DType, FaultKind};
use pp_device::{DevicePtr, Stream};
use pp_kernels::{Collectives, Failure, KernelError};
use pp_runtime::stage::{StageError, StageResult};
use pp_transport::error::TransportError;
use pp_transport::group::Members;
use pp_transport::host::HostGroup;
use pp_transport::nccl::Communicator;

use super::kernels::failed;

/// A group and the streams of its session, for the time of a call.
pub(super) struct Lent<'a, G, S> {
    group: &'a mut G,
    streams: S,
    /// Why a collective failed. From the kernels only the text of this error comes back.
    failed: Option<TransportError>,
}

/// In host memory.
pub(super) type OfHost<'a> = Lent<'a, HostGroup, ()>;
/// In the memory of a GPU: with the session's own stream, and that of its results, which has the gathers.
pub(super) type OfGpu<'a> = Lent<'a, Communicator, [&'a Stream; 2]>;

impl<'a, G, S> Lent<'a, G, S> {
    pub(super) fn new(group: &'a mut G, streams: S) -> Self {
        Self {
            group,
            streams,
            failed: None,
        }
    }

    fn keep(&mut self, result: Result<(), TransportError>) -> Result<(), Failure> {
        result.map_err(|error| {
            let failure = Failure::error(error.to_string());
            self.failed = Some(error);
            failure
        })
    }

    /// The result of a call; the error of the group, where a collective failed.
    pub(super) fn judge<T>(
        self,
        result: Result<T, KernelError>,
        (blame, stage): (FaultKind, &'static str),
    ) -> StageResult<T> {
        match self.failed {
            Some(error) => Err(StageError {
                operation: stage,
                ..StageError::from(error)
            }),
            None => result.map_err(failed(blame, stage)),
        }
    }
}

/// # Safety
/// There are `count` readable bytes at `at`, and nothing writes them for as long as the result lives. Where `count` is 0,
/// `at` may be anything.
unsafe fn bytes<'b>(at: *const u8, count: u64) -> &'b [u8] {
    match count {
        0 => &[],
        // SAFETY: the caller's duty.
        _ => unsafe { std::slice::from_raw_parts(at, count as usize) },
    }
}

/// # Safety
/// As [`bytes`], for bytes that can be written and that nothing else uses.
unsafe fn bytes_mut<'b>(at: *mut u8, count: u64) -> &'b mut [u8] {
    match count {
        0 => &mut [],
        // SAFETY: the caller's duty.
        _ => unsafe { std::slice::from_raw_parts_mut(at, count as usize) },
    }
}

/// Bytes of all parts, at the root alone, and of this member's own part.
fn shares(members: &Members, parts: &[u64], root: u32) -> (u64, u64) {
    let place = members.own_place();
    let all = match place == root as usize {
        true => parts.iter().sum(),
        false => 0,
    };
    (all, parts.get(place).copied().unwrap_or(0))
}

fn range(at: *const u8, count: u64) -> DevicePtr {
    DevicePtr {
        address: at.addr() as u64,
        len: count as usize,
    }
}

/// Implements the collectives by those of a group: with what makes a range to read and one to write, and with the places of
/// the streams.
macro_rules! collectives {
    ($lent:ty, $read:ident, $write:ident $(, $own:literal, $results:literal)?) => {
        impl Collectives for $lent {
            unsafe fn broadcast(
                &mut self,
                data: *mut u8,
                count: u64,
                root: u32,
            ) -> Result<(), Failure> {
                // SAFETY: the contract of the trait: a range that is this call's, on a device until the stream has passed it.
                let done = unsafe {
                    self.group.broadcast($write(data, count), root $(, self.streams[$own])?)
                };
                self.keep(done)
            }

            unsafe fn scatter(
                &mut self,
                from: *const u8,
                parts: &[u64],
                to: *mut u8,
                root: u32,
            ) -> Result<(), Failure> {
                let (all, own) = shares(self.group.members(), parts, root);
                // SAFETY: as in `broadcast`; the two do not overlap.
                let done = unsafe {
                    let (from, to) = ($read(from, all), $write(to, own));
                    self.group.scatter(from, parts, to, root $(, self.streams[$own])?)
                };
                self.keep(done)
            }

            unsafe fn gather(
                &mut self,
                from: *const u8,
                parts: &[u64],
                to: *mut u8,
                root: u32,
            ) -> Result<(), Failure> {
                let (all, own) = shares(self.group.members(), parts, root);
                // SAFETY: as in `scatter`.
                let done = unsafe {
                    let (from, to) = ($read(from, own), $write(to, all));
                    self.group.gather(from, parts, to, root $(, self.streams[$results])?)
                };
                self.keep(done)
            }

            unsafe fn all_reduce_sum(
                &mut self,
                data: *mut u8,
                count: u64,
                dtype: DType,
            ) -> Result<(), Failure> {
                // SAFETY: as in `broadcast`.
                let done = unsafe {
                    let data = $write(data, count * dtype.size_bytes());
                    self.group.all_reduce_sum(data, dtype $(, self.streams[$own])?)
                };
                self.keep(done)
            }

            unsafe fn send(&mut self, from: *const u8, count: u64, to: u32) -> Result<(), Failure> {
                // SAFETY: as in `broadcast`.
                let done = unsafe {
                    self.group.send($read(from, count), to $(, self.streams[$own])?)
                };
                self.keep(done)
            }

            unsafe fn receive(
                &mut self,
                to: *mut u8,
                count: u64,
                from: u32,
            ) -> Result<(), Failure> {
                // SAFETY: as in `broadcast`.
                let done = unsafe {
                    self.group.receive($write(to, count), from $(, self.streams[$own])?)
                };
                self.keep(done)
            }

            fn barrier(&mut self) -> Result<(), Failure> {
                let done = self.group.barrier($(self.streams[$own])?);
                self.keep(done)
            }
        }
    };
}

collectives!(OfHost<'_>, bytes, bytes_mut);
collectives!(OfGpu<'_>, range, range, 0, 1);

#[cfg(test)]
mod tests {
    use pp_contract::Rank;
    use pp_kernels::{
        Chroma, ChunkShape, FrameGeometry, FrameView, KernelSet, Payload, PayloadMut,
        SessionConfig, StageSession, VideoPlanParts,
    };

    use super::*;

    const STEPS: u32 = 3;
    const CONFIG: fn() -> SessionConfig = || SessionConfig {
        threads: 1,
        noise_sigma: Some(12.0),
        ..SessionConfig::host(20, 75, Chroma::C420, 2)
    };

    fn open(stage: &str, config: &SessionConfig) -> StageSession {
        let opened = KernelSet::for_host().open_stage(stage, config, &[]);
        opened.expect("the kernels open")
    }

    /// The plan and the payload of two chunks of two frames; the second brings its context.
    fn chunks() -> Vec<(VideoPlanParts, ChunkShape, Vec<u8>)> {
        let config = CONFIG();
        let first = VideoPlanParts::first(config.width, config.height, STEPS);
        let geometry = FrameGeometry::of(&config);
        let size = geometry.frame_bytes();
        let mut source = open("encode", &config);
        let plans = [(first, 0), (first.following(2, true), 2)];
        let chunks = plans.map(|(plan, context_frames)| {
            let shape = ChunkShape {
                frames: 2,
                steps: STEPS,
                context_frames,
            };
            let start = plan.current_start_frame as usize;
            let frames = [start, start + 1].map(|frame| -> Vec<u8> {
                let sample = |at: usize| (at * at / 7 + frame * 5 + at / 40 * 3) % 251;
                (0..size).map(|at| sample(at) as u8).collect()
            });
            let views = frames
                .each_ref()
                .map(|frame| FrameView::packed(frame, &geometry).unwrap());
            let tensors = source.layout(shape, 0).unwrap().outputs;
            let mut bytes = vec![0; tensors.payload_bytes() as usize];
            let mut payload = PayloadMut::new(&tensors, &mut bytes).unwrap();
            source.encode(&views, &plan, &mut payload).unwrap();
            (plan, shape, bytes)
        });
        chunks.into()
    }

    /// What one member gives; the leader gives the bytes.
    fn member(config: &SessionConfig, mut group: Option<HostGroup>) -> Vec<Vec<u8>> {
        let mut session = open("phase_b", config);
        let run = |(plan, shape, input): (VideoPlanParts, ChunkShape, Vec<u8>)| {
            let layout = session.layout(shape, 0).unwrap();
            let mut bytes = vec![0; layout.outputs.payload_bytes() as usize];
            let (from, mut to) = match config.member {
                0 => (
                    Payload::new(&layout.inputs, &input).unwrap(),
                    PayloadMut::new(&layout.outputs, &mut bytes).unwrap(),
                ),
                _ => (
                    Payload::of_leader(&layout.inputs),
                    PayloadMut::of_leader(&layout.outputs),
                ),
            };
            let calls = match &mut group {
                None => session.run(&plan, 0, &from, &mut to, None).unwrap(),
                Some(group) => {
                    let mut lent = OfHost::new(group, ());
                    let calls = session.run(&plan, 0, &from, &mut to, Some(&mut lent));
                    lent.judge(calls, (FaultKind::Plugin, "phase_b")).unwrap()
                }
            };
            assert_eq!(calls, STEPS + u32::from(plan.do_kv_recompute));
            bytes
        };
        chunks().into_iter().map(run).collect()
    }

    /// With more members than rows too.
    #[test]
    fn a_group_of_the_transport_gives_what_one_rank_gives() {
        let alone = member(&CONFIG(), None);
        for members in [2, 3, 13] {
            let ranks: Vec<Rank> = (0..members).map(Rank::new).collect();
            let groups = HostGroup::of_threads("phase_b", &ranks).unwrap();
            let found = std::thread::scope(|scope| {
                let run = |(at, group)| {
                    let config = SessionConfig {
                        member: at,
                        members,
                        ..CONFIG()
                    };
                    scope.spawn(move || member(&config, Some(group)))
                };
                let members: Vec<_> = (0..).zip(groups).map(run).collect();
                let mut found = members.into_iter().map(|member| member.join().unwrap());
                let leader = found.next();
                found.for_each(drop);
                leader
            });
            assert!(found.as_ref() == Some(&alone), "{members} members");
        }
    }

    #[test]
    fn the_fault_of_a_group_is_not_blamed_on_the_plugin() {
        let ranks = [0, 1].map(Rank::new);
        let mut groups = HostGroup::of_threads("phase_b", &ranks).unwrap();
        drop(groups.pop());
        let mut lent = OfHost::new(&mut groups[0], ());
        assert!(lent.barrier().is_err());
        let error = lent
            .judge(Ok(()), (FaultKind::Plugin, "phase_b"))
            .unwrap_err();
        assert_ne!(error.kind, FaultKind::Plugin);
    }
}
