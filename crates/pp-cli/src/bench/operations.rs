//! The bare operations of a group, one way and there and back: what an edge is made of, without
//! headers and credits, to be held against NCCL called by hand.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pp_contract::{DType, Rank};
use pp_device::{Device, DeviceBuffer, Event, Stream};
use pp_transport::error::TransportError;
use pp_transport::in_flight::{Completion, InFlight};
use pp_transport::nccl::{Communicator, GroupBuffer, GroupOp};

/// An operation that takes longer than this is lost.
const PATIENCE: Duration = Duration::from_secs(10);
/// Runs of which the median counts.
const ROUNDS: usize = 7;
const TRIPS: usize = 100;
/// Above this a few operations take long enough, and few buffers are enough.
const LARGE_BYTES: u64 = 32 << 20;

/// What operations of one size take, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operations {
    pub(super) bytes: u64,
    pub(super) one_way_us: f64,
    pub(super) round_trip_us: f64,
}

/// Which way an operation goes, seen from this rank.
#[derive(Clone, Copy)]
enum Way {
    Out,
    In,
}

/// One rank of the measurement.
struct Bench<'a> {
    comm: &'a mut Communicator,
    stream: &'a Stream,
    rank: Rank,
}

/// Measures sends and receives of these sizes; both ranks call it with the same ones. The watchdog ends this rank where
/// the other is lost.
pub(super) fn measure(
    comm: &mut Communicator,
    device: &Device,
    sizes: &[u64],
    rank: Rank,
) -> Result<Vec<Operations>, TransportError> {
    device.bind()?;
    let stream = Stream::urgent(device)?;
    let mut bench = Bench {
        comm,
        stream: &stream,
        rank,
    };
    let size = |&bytes: &u64| {
        let buffers = if bytes > LARGE_BYTES { 2 } else { 4 };
        let make = |_| buffer(device, bytes);
        let mut ring: VecDeque<GroupBuffer> = (0..buffers).map(make).collect::<Result<_, _>>()?;
        Ok(Operations {
            bytes,
            one_way_us: bench.one_way(&mut ring, bytes)?,
            round_trip_us: bench.round_trip(&mut ring)?,
        })
    };
    sizes.iter().map(size).collect()
}

fn buffer(device: &Device, bytes: u64) -> Result<GroupBuffer, TransportError> {
    let memory = DeviceBuffer::new(device, bytes as usize)?;
    Ok(GroupBuffer::new(memory, DType::U8, bytes as usize).expect("it holds its own bytes"))
}

impl Bench<'_> {
    fn is_first(&self) -> bool {
        self.rank == Rank::new(0)
    }

    fn issue(
        &mut self,
        buffer: GroupBuffer,
        way: Way,
    ) -> Result<InFlight<GroupOp>, TransportError> {
        let peer = Rank::new(u32::from(self.is_first()));
        let mut group = self.comm.group();
        let added = match way {
            Way::Out => group.send(buffer, peer),
            Way::In => group.recv(buffer, peer),
        };
        added.map_err(|refused| refused.error)?;
        let mut under_way = group.commit(self.stream).map_err(|e| e.error)?;
        Ok(under_way.pop().expect("one operation was committed"))
    }

    /// Median time of one of many operations in a row.
    fn one_way(
        &mut self,
        ring: &mut VecDeque<GroupBuffer>,
        bytes: u64,
    ) -> Result<f64, TransportError> {
        let way = if self.is_first() { Way::Out } else { Way::In };
        let operations = if bytes > LARGE_BYTES { 30 } else { 200 };
        let on = self.stream.device().clone();
        let (start, end) = (Event::timed(&on)?, Event::timed(&on)?);
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let mut under_way = VecDeque::with_capacity(ring.len());
            start.record(self.stream)?;
            for _ in 0..operations {
                let free = match ring.pop_front() {
                    Some(free) => free,
                    None => {
                        self.finish(under_way.pop_front().expect("all buffers are in flight"))?
                    }
                };
                under_way.push_back(self.issue(free, way)?);
            }
            end.record(self.stream)?;
            for operation in under_way {
                ring.push_back(self.finish(operation)?);
            }
            // The event lies behind operations that are done.
            let deadline = Instant::now() + PATIENCE;
            while !end.is_done()? {
                in_time(deadline)?;
            }
            let ns = end.elapsed_ns(&start)?;
            times.push(ns as f64 / 1e3 / f64::from(operations));
        }
        Ok(median(times))
    }

    /// Median time from issuing a send to seeing the answer.
    fn round_trip(&mut self, ring: &mut VecDeque<GroupBuffer>) -> Result<f64, TransportError> {
        let ways = if self.is_first() {
            [Way::Out, Way::In]
        } else {
            [Way::In, Way::Out]
        };
        let mut times = Vec::with_capacity(TRIPS);
        for _ in 0..TRIPS {
            let start = Instant::now();
            let mut under_way = Vec::with_capacity(2);
            for way in ways {
                let free = ring.pop_front().expect("two buffers at least");
                under_way.push(self.issue(free, way)?);
            }
            for operation in under_way {
                ring.push_back(self.finish(operation)?);
            }
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(times))
    }

    /// Waits for one operation and takes its buffer back.
    fn finish(&self, mut operation: InFlight<GroupOp>) -> Result<GroupBuffer, TransportError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match operation.complete() {
                Ok(Completion::Done(buffer)) => return Ok(buffer),
                Ok(Completion::Pending(again)) => operation = again,
                Err(gone) => return Err(gone.error),
            }
            in_time(deadline)?;
        }
    }
}

fn in_time(deadline: Instant) -> Result<(), TransportError> {
    if Instant::now() < deadline {
        std::hint::spin_loop();
        return Ok(());
    }
    Err(TransportError::NotInTime {
        what: "the bare operations".into(),
        step: "send and receive",
        after: PATIENCE,
    })
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
