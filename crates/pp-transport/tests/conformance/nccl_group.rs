//! Operations among the members of a group: two ranks of this process, one on each device.

use std::time::Instant;

use pp_contract::{DType, Rank};
use pp_device::{Device, DeviceBuffer, PinnedBuffer, Stream};
use pp_testing::wait_for;
use pp_transport::backend::Abort;
use pp_transport::error::TransportError;
use pp_transport::nccl::{CommOptions, Communicator, GroupBuffer, Issuer, Reduce, UniqueId};

use crate::devices::{Gate, HANG, fakes, is_real, issuers, settled_free, wait};
use crate::nccl_faults::abort_waits_at;

/// Ranks 1 and 2: a group of which rank 0 is no member.
const MEMBERS: [u32; 2] = [1, 2];

fn join(issuer: Issuer, id: UniqueId, me: u32) -> Result<Communicator, TransportError> {
    Communicator::connect(CommOptions {
        issuer,
        name: "mesh",
        members: MEMBERS.map(Rank::new).to_vec(),
        me: Rank::new(me),
        id,
        gathers: None,
        deadline: Instant::now() + HANG,
        blocking: true,
    })
}

fn mesh() -> [Communicator; 2] {
    let [first, second] = issuers();
    let id = UniqueId::new(first.nccl()).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(move || join(second, id, 2));
        let first = join(first, id, 1).unwrap();
        [first, second.join().unwrap().unwrap()]
    })
}

fn stream(on: usize) -> Stream {
    Stream::new(&Device::open(on as u32).unwrap()).unwrap()
}

/// Device memory with these bytes in it.
fn filled(stream: &Stream, bytes: &[u8]) -> DeviceBuffer {
    let mut pinned = PinnedBuffer::new(stream.device(), bytes.len()).unwrap();
    pinned.bytes_mut().copy_from_slice(bytes);
    let buffer = DeviceBuffer::new(stream.device(), bytes.len()).unwrap();
    // SAFETY: both live until the stream has passed, below, and no other code knows them.
    unsafe { stream.upload(&pinned, 0..bytes.len(), buffer.ptr()) }.unwrap();
    wait(|| stream.is_idle().unwrap());
    buffer
}

fn content(stream: &Stream, buffer: &DeviceBuffer) -> Vec<u8> {
    let mut pinned = PinnedBuffer::new(stream.device(), buffer.len()).unwrap();
    // SAFETY: as in `filled`; the caller has waited for what writes the buffer.
    unsafe { stream.download(buffer.ptr(), &mut pinned, 0) }.unwrap();
    wait(|| stream.is_idle().unwrap());
    pinned.bytes().to_vec()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn of_floats(stream: &Stream, values: &[f32]) -> GroupBuffer {
    GroupBuffer::new(filled(stream, &floats(values)), DType::F32, values.len()).unwrap()
}

/// Runs one rank's part on a thread of its own, as ranks do: the first use of an algorithm may wait
/// for the other inside NCCL.
fn each<R: Send>(
    mesh: [Communicator; 2],
    part: impl Fn(usize, &mut Communicator, &Stream) -> R + Sync,
) -> ([Communicator; 2], [R; 2]) {
    let part = &part;
    let [first, second] = mesh;
    let run = |i: usize, mut comm: Communicator| {
        let done = part(i, &mut comm, &stream(i));
        (comm, done)
    };
    std::thread::scope(|scope| {
        let parts = [
            scope.spawn(move || run(0, first)),
            scope.spawn(move || run(1, second)),
        ];
        let [(first, a), (second, b)] = parts.map(|part| part.join().unwrap());
        ([first, second], [a, b])
    })
}

/// All of a rank's operations in one group: reductions, a broadcast, and an exchange past what NCCL
/// buffers, which would hang if one had to end before the next began.
#[test]
fn the_members_reduce_broadcast_and_exchange() {
    let large = if is_real() { 160 << 20 } else { 2 << 20 };
    each(mesh(), |i, comm, stream| {
        let i_f = i as f32;
        let other = Rank::new(MEMBERS[1 - i]);
        let mut group = comm.group();
        let sum = of_floats(stream, &[1.0 + i_f, 10.0, -2.5 * i_f]);
        group.all_reduce(sum, Reduce::Sum).unwrap();
        let greatest = of_floats(stream, &[i_f, 5.0 - i_f]);
        group.all_reduce(greatest, Reduce::Max).unwrap();
        let from_second = of_floats(stream, &[i_f * 7.0; 9]);
        group.broadcast(from_second, Rank::new(2)).unwrap();
        let out = filled(stream, &vec![i as u8 + 1; large]);
        let out = GroupBuffer::new(out, DType::U8, large).unwrap();
        group.send(out, other).unwrap();
        let into = filled(stream, &vec![0; large]);
        let into = GroupBuffer::new(into, DType::U8, large).unwrap();
        group.recv(into, other).unwrap();

        let done: Vec<_> = group
            .commit(stream)
            .unwrap()
            .into_iter()
            .map(|flight| content(stream, wait_for(flight).memory()))
            .collect();
        assert_eq!(done[0], floats(&[3.0, 20.0, -2.5]));
        assert_eq!(done[1], floats(&[1.0, 5.0]));
        assert_eq!(done[2], floats(&[7.0; 9]));
        assert!(done[3] == vec![i as u8 + 1; large]);
        assert!(done[4] == vec![2 - i as u8; large]);
    });
}

#[test]
fn what_is_not_of_the_group_is_refused_before_nccl_sees_it() {
    let mut mesh = mesh();
    let streams = [stream(0), stream(1)];
    let mut group = mesh[0].group();
    let buffer = of_floats(&streams[0], &[1.0]);

    let refused = group.send(buffer, Rank::new(0)).unwrap_err();
    let text = refused.error.to_string();
    assert!(
        text.contains("mesh") && text.contains("rank 0 is none of its members"),
        "{text}"
    );
    let refused = group.recv(refused.buffer, Rank::new(1)).unwrap_err();
    assert!(refused.error.to_string().contains("rank 1 is this rank"));
    let refused = group.broadcast(refused.buffer, Rank::new(3)).unwrap_err();
    assert!(refused.error.to_string().contains("rank 3 is none"));
    let elsewhere = of_floats(&streams[1], &[1.0]);
    let refused_too = group.all_reduce(elsewhere, Reduce::Sum).unwrap_err();
    assert!(refused_too.error.to_string().contains("device 1"));

    // On a stream of another device nothing is issued, and the buffer comes back.
    group.all_reduce(refused.buffer, Reduce::Sum).unwrap();
    let refused = group.commit(&streams[1]).unwrap_err();
    assert!(refused.error.to_string().contains("device 1"));
    assert_eq!(refused.buffers.len(), 1);

    let memory = DeviceBuffer::new(streams[0].device(), 10).unwrap();
    let memory = GroupBuffer::new(memory, DType::F32, 3).unwrap_err();
    assert!(GroupBuffer::new(memory, DType::F32, usize::MAX).is_err());

    let [first, _] = issuers();
    let id = UniqueId::new(first.nccl()).unwrap();
    let stranger = join(first, id, 0).unwrap_err().to_string();
    assert!(stranger.contains("rank 0 is none"), "{stranger}");

    let [first, _] = issuers();
    let twice = Communicator::connect(CommOptions {
        issuer: first,
        name: "mesh",
        members: [1, 2, 1].map(Rank::new).to_vec(),
        me: Rank::new(2),
        id,
        gathers: None,
        deadline: Instant::now(),
        blocking: true,
    });
    let twice = twice.unwrap_err().to_string();
    assert!(twice.contains("rank 1 is a member twice"), "{twice}");
}

/// No caller has to wait for an operation: its buffer is kept until it is over. How much of a real
/// device is free is not for this process alone to say.
#[test]
fn a_dropped_operation_keeps_its_buffer_until_it_is_over() {
    let mesh = mesh();
    let device = Device::open(0).unwrap();
    let before = settled_free(&device);
    let (mut mesh, _) = each(mesh, |_, comm, stream| {
        for round in 0..20 {
            let mut group = comm.group();
            let buffer = of_floats(stream, &[round as f32; 100]);
            group.all_reduce(buffer, Reduce::Sum).unwrap();
            drop(group.commit(stream).unwrap());
        }
        wait(|| stream.is_idle().unwrap());
        // Frees what is over.
        drop(comm.group());
    });
    let deadline = Instant::now() + HANG;
    if !is_real() {
        while device.memory().unwrap().free < before {
            assert!(Instant::now() < deadline, "the buffers were never freed");
            std::thread::yield_now();
        }
    }
    drop(mesh[0].group());
    let [first, second] = mesh;
    std::thread::scope(|scope| {
        let first = scope.spawn(move || first.close(deadline));
        second.close(deadline).unwrap();
        first.join().unwrap().unwrap();
    });
}

#[test]
fn an_aborted_group_gives_no_buffer_back() {
    let mut mesh = mesh();
    let stream = stream(0);
    let mut group = mesh[0].group();
    // The other member never sends it.
    let buffer = of_floats(&stream, &[1.0; 64]);
    group.recv(buffer, Rank::new(2)).unwrap();
    let flights = group.commit(&stream).unwrap();
    let deadline = Instant::now() + HANG;
    for comm in &mesh {
        let handle = comm.abort_handle();
        handle.abort("a member is missing", deadline).unwrap();
    }
    for flight in flights {
        let failed = flight.complete().unwrap_err();
        assert!(failed.error.to_string().contains("a member is missing"));
    }
    let refused = mesh[1].group().commit(&stream).unwrap_err();
    assert!(refused.error.to_string().contains("mesh"), "{refused}");
}

/// A thread that has begun a group has to end it: until then the communicator is there.
#[test]
fn a_communicator_is_not_freed_while_a_group_is_begun() {
    let Some(fakes) = fakes() else {
        return;
    };
    let [mut first, _second] = mesh();
    let (stream, handle) = (stream(0), first.abort_handle());
    let mut group = first.group();
    let one = of_floats(&stream, &[1.0]);
    group.all_reduce(one, Reduce::Sum).unwrap();
    let gate = Gate::closed(fakes);
    fakes.set("FAULTS", "ncclAllReduce:1:wait");
    let issued = std::thread::scope(|scope| {
        let abort: Abort = Box::new(move |why, deadline| handle.abort(why, deadline));
        scope.spawn(move || abort_waits_at(gate, &abort));
        group.commit(&stream).unwrap()
    });
    fakes.set("FAULTS", "");
    let error = issued[0].is_done().unwrap_err().to_string();
    assert!(error.contains("the test"), "{error}");
}
