//! Groups on devices: the collectives on memory that the caller keeps, over the fake NCCL.

use pp_contract::DType;
use pp_device::{Device, DeviceBuffer, DevicePtr, PinnedBuffer, Stream};
use pp_testing::{Barrier, HANG, assert_has, until_some};
use pp_transport::edge::GroupEnd as _;
use pp_transport::error::TransportError;
use pp_transport::flight::{FlightRecorder, Kind, State};
use pp_transport::launch::Via;
use pp_transport::nccl::{Communicator, Issuer, Nccl, NcclBackend};

use super::{Instant, each, join};
use crate::edges_support::turn;
use pp_fakes::Fakes;

const DEVICES: usize = 3;

/// One member on a device of its own, with some memory.
struct Member {
    at: usize,
    group: Communicator,
    stream: Stream,
    memory: DeviceBuffer,
    pinned: PinnedBuffer,
    recorder: FlightRecorder,
    abort: pp_transport::backend::Abort,
}

const ROOM: usize = 8 << 20;

impl Member {
    fn part(&self, start: usize, len: usize) -> DevicePtr {
        assert!(start + len <= ROOM);
        DevicePtr {
            address: self.memory.address() + start as u64,
            len,
        }
    }

    fn write(&mut self, start: usize, bytes: &[u8]) -> DevicePtr {
        let to = self.part(start, bytes.len());
        self.pinned.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: the range lies in the member's own memory, and the stream is waited for.
        unsafe { self.stream.upload(&self.pinned, 0..bytes.len(), to) }.unwrap();
        self.stream.wait_until_idle(HANG).unwrap();
        to
    }

    fn read(&mut self, from: DevicePtr) -> Vec<u8> {
        // SAFETY: as above.
        unsafe { self.stream.download(from, &mut self.pinned, 0) }.unwrap();
        self.stream.wait_until_idle(HANG).unwrap();
        self.pinned.bytes()[..from.len].to_vec()
    }
}

/// Waits until the thread that ends a group has left the device to the next test.
fn await_issuer(nccl: &Nccl, device: &Device) {
    until_some("the device", || match Issuer::open(nccl, device) {
        Err(TransportError::DeviceTaken { .. }) => None,
        opened => Some(opened.unwrap()),
    });
}

fn members<R: Send>(count: usize, part: impl Fn(&mut Member) -> R + Sync) -> Vec<R> {
    let _turn = turn();
    Fakes::newest().load().set("DEVICES", &DEVICES.to_string());
    let nccl = Nccl::load().unwrap();
    let done = each(count, Via::Unix, |at, wires| {
        let device = Device::open(at as u32).unwrap();
        let mut backend = NcclBackend::new(device.clone(), nccl.clone());
        let recorder = FlightRecorder::new(64);
        let joined = join(&mut backend, at, count, wires, &recorder).unwrap();
        let mut member = Member {
            at,
            group: joined.group,
            stream: Stream::new(&device).unwrap(),
            memory: DeviceBuffer::new(&device, ROOM).unwrap(),
            pinned: PinnedBuffer::new(&device, ROOM).unwrap(),
            recorder,
            abort: joined.abort,
        };
        part(&mut member)
    });
    for at in 0..count {
        await_issuer(&nccl, &Device::open(at as u32).unwrap());
    }
    done
}

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 31 + at / 251 + seed * 101) as u8)
        .collect()
}

#[test]
fn members_broadcast_reduce_and_exchange_on_their_streams() {
    for count in 2..=DEVICES {
        members(count, |m| {
            for (number, size) in [0, 1, 7, 3 << 20].into_iter().enumerate() {
                let root = number % count;
                let data = m.write(0, &bytes(if m.at == root { number } else { 99 }, size));
                // SAFETY: the member's own memory, which only its stream uses.
                unsafe { m.group.broadcast(data, root as u32, &m.stream) }.unwrap();
                assert!(
                    m.read(data) == bytes(number, size),
                    "{size} bytes at {}",
                    m.at
                );
            }
            let own: Vec<u8> = [1.0, m.at as f32]
                .into_iter()
                .flat_map(f32::to_le_bytes)
                .collect();
            let data = m.write(0, &own);
            // SAFETY: as above.
            unsafe { m.group.all_reduce_sum(data, DType::F32, &m.stream) }.unwrap();
            m.group.barrier(&m.stream).unwrap();
            let total = (0..count).sum::<usize>() as f32;
            let wanted: Vec<u8> = [count as f32, total]
                .into_iter()
                .flat_map(f32::to_le_bytes)
                .collect();
            assert_eq!(m.read(data), wanted);

            // Past what NCCL buffers.
            let len = 2 << 20;
            if m.at == 0 {
                let data = m.write(0, &bytes(5, len));
                // SAFETY: as above.
                unsafe { m.group.send(data, 1, &m.stream) }.unwrap();
            } else if m.at == 1 {
                let data = m.part(0, len);
                // SAFETY: as above.
                unsafe { m.group.receive(data, 0, &m.stream) }.unwrap();
                assert!(m.read(data) == bytes(5, len));
            }
            m.stream.wait_until_idle(HANG).unwrap();
            m.group.barrier(&m.stream).unwrap();
            m.stream.wait_until_idle(HANG).unwrap();
        });
    }
}

#[test]
fn unequal_parts_go_out_and_come_back() {
    let parts = [[7, 0, 3 << 20], [0, 0, 0], [0, 5, 0], [1 << 20, 4096, 1]];
    members(DEVICES, |m| {
        for (number, parts) in parts.iter().enumerate() {
            let root = number % DEVICES;
            let total = parts.iter().sum::<u64>() as usize;
            let start = parts[..m.at].iter().sum::<u64>() as usize;
            let all = bytes(number, total);
            let own = all[start..][..parts[m.at] as usize].to_vec();
            let is_root = m.at == root;
            let given = m.write(0, if is_root { &all } else { &[] });
            let part = m.part(ROOM / 2, own.len());
            // SAFETY: parts of the member's own memory that do not overlap, and only its stream uses.
            unsafe { m.group.scatter(given, parts, part, root as u32, &m.stream) }.unwrap();
            assert!(m.read(part) == own, "{parts:?} at {}", m.at);
            let back = m.write(0, &vec![0xee; if is_root { total } else { 0 }]);
            // SAFETY: as above.
            unsafe { m.group.gather(part, parts, back, root as u32, &m.stream) }.unwrap();
            assert!(m.read(back) == if is_root { all } else { Vec::new() });
        }
    });
}

#[test]
fn what_is_not_of_the_group_is_refused_before_nccl_sees_it() {
    members(2, |m| {
        let (all, one) = (m.part(0, 6), m.part(8, 1));
        let own = m.at as u32;
        let stream = m.stream.clone();
        let refused = |result: Result<(), TransportError>, word: &str| {
            let error = result.unwrap_err();
            assert!(
                matches!(error, TransportError::WrongGroup { .. }),
                "{error}"
            );
            assert!(error.to_string().contains(word), "{error}");
        };
        // SAFETY: the member's own memory, and nothing is issued.
        unsafe {
            refused(m.group.broadcast(all, 2, &stream), "no member 2");
            refused(m.group.send(all, own, &stream), "is this rank");
            refused(m.group.receive(all, 9, &stream), "no member 9");
            refused(m.group.scatter(all, &[1], one, 0, &stream), "1 parts for 2");
            refused(
                m.group.scatter(all, &[3, 3], one, own, &stream),
                "1 bytes where the parts say 3",
            );
            refused(
                m.group.gather(one, &[1, 1], all, own, &stream),
                "6 bytes where the parts say 2",
            );
            refused(
                m.group.all_reduce_sum(all, DType::F32, &stream),
                "no whole number",
            );
            refused(
                m.group.all_reduce_sum(all, DType::U8, &stream),
                "not summed",
            );
        }
        let elsewhere = Stream::new(&Device::open(1 - own).unwrap()).unwrap();
        refused(m.group.barrier(&elsewhere), "a stream of device");
        // Nor does the root copy its own part.
        let (all, own_part) = (m.write(0, &bytes(1, 6)), m.write(8, &bytes(2, 3)));
        // SAFETY: the member's own memory, and nothing is issued.
        let scattered = unsafe { m.group.scatter(all, &[3, 3], own_part, own, &elsewhere) };
        refused(scattered, "a stream of device");
        elsewhere.wait_until_idle(HANG).unwrap();
        assert!(m.read(own_part) == bytes(2, 3));
        m.group.barrier(&stream).unwrap();
        stream.wait_until_idle(HANG).unwrap();
    });
}

#[test]
fn what_was_issued_is_in_the_recording() {
    members(2, |m| {
        for _ in 0..3 {
            m.group.barrier(&m.stream).unwrap();
            m.stream.wait_until_idle(HANG).unwrap();
        }
        let (operations, _) = m.recorder.operations();
        let found: Vec<_> = operations
            .iter()
            .map(|o| (o.kind, o.number, o.state))
            .collect();
        // The last is known to be over at the next call, or at the end.
        let wanted = [State::Done, State::Done, State::Started];
        let wanted: Vec<_> = wanted.into_iter().zip(0..).collect();
        let wanted: Vec<_> = wanted
            .into_iter()
            .map(|(s, n)| (Kind::Barrier, Some(n), s))
            .collect();
        assert_eq!(found, wanted);
    });
}

/// No completion would ever say it.
#[test]
fn an_asynchronous_nccl_error_is_seen_while_work_is_under_way() {
    let all = Barrier::new(2);
    members(2, |m| {
        let data = m.part(0, 2 << 20);
        // A member that is still joining would fail, too.
        all.wait();
        if m.at == 0 {
            let fakes = Fakes::newest().load();
            // SAFETY: the member's own memory, which stays until the abort has returned.
            unsafe { m.group.receive(data, 1, &m.stream) }.unwrap();
            m.group.look().unwrap();
            fakes.set("FAULTS", "ncclCommGetAsyncError:1:3");
            let error = until_some("the error", || m.group.look().err()).to_string();
            fakes.set("FAULTS", "");
            assert!(error.contains("group phase_b failed by itself"), "{error}");
            m.group.barrier(&m.stream).unwrap_err();
        }
        all.wait();
        (m.abort)("a member has failed", Instant::now() + HANG).unwrap();
    });
}

/// NCCL would wait for the others if a communicator ended in order.
#[test]
fn a_group_of_which_a_member_is_gone_is_given_up() {
    members(2, |m| {
        m.group.peer_is_gone();
        m.group.barrier(&m.stream).unwrap_err();
    });
}

#[test]
fn a_gather_that_waits_holds_up_nothing_on_another_stream() {
    let scattered = Barrier::new(2);
    members(2, |m| {
        let (parts, len) = ([0, 2 << 20], 2 << 20);
        let given = m.write(0, &bytes(3, if m.at == 0 { len } else { 0 }));
        let part = m.part(len, len * m.at);
        let back = m.part(2 * len, len * (1 - m.at));
        let results = Stream::new(m.stream.device()).unwrap();
        // SAFETY: parts of the member's own memory that do not overlap, and only these streams use; member 1 gathers what
        // it has.
        unsafe {
            if m.at == 0 {
                (m.group.gather(part, &parts, back, 0, &results)).unwrap();
            }
            (m.group.scatter(given, &parts, part, 0, &m.stream)).unwrap();
            m.stream.wait_until_idle(HANG).unwrap();
            scattered.wait();
            if m.at == 1 {
                (m.group.gather(part, &parts, back, 0, &results)).unwrap();
            }
        }
        results.wait_until_idle(HANG).unwrap();
        if m.at == 0 {
            assert!(m.read(back) == bytes(3, len));
        }
    });
}

/// Whichever of the two communicators of the group waits.
#[test]
fn an_abort_ends_what_waits_for_a_member_that_never_comes() {
    let issued = Barrier::new(2);
    members(2, |m| {
        let (data, parts) = (m.part(0, 2 << 20), [0, 1 << 20]);
        let (none, back) = (m.part(2 << 20, 0), m.part(2 << 20, 1 << 20));
        let results = Stream::new(m.stream.device()).unwrap();
        if m.at == 0 {
            // SAFETY: the member's own memory, which stays until the abort has returned.
            unsafe {
                m.group.receive(data, 1, &m.stream).unwrap();
                (m.group.gather(none, &parts, back, 0, &results)).unwrap();
            }
            assert!(!m.stream.is_idle().unwrap() && !results.is_idle().unwrap());
        }
        issued.wait();
        (m.abort)("a member is missing", Instant::now() + HANG).unwrap();
        m.stream.wait_until_idle(HANG).unwrap();
        results.wait_until_idle(HANG).unwrap();
        let error = m.group.barrier(&m.stream).unwrap_err().to_string();
        assert_has(&error, &["phase_b was aborted: a member is missing"]);
    });
}
