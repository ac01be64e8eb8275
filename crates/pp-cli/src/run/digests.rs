//! Digests in device memory: kernels on the stream of the stage's results, and a copy of the digests to page-locked memory.
//!
//! Everything is ordered by that one stream, and nothing waits. The host never touches a payload: what it reads was copied
//! out of it by the device.

use std::error::Error;

use pp_command::timed::Staged;
use pp_contract::{Digests, FaultKind, MAX_TENSORS, Manifest, with_source};
use pp_device::{CudaError, DevicePtr, Event, Stream};
use pp_kernels::{DeviceDigests, DeviceTensor};
use pp_runtime::stage::{StageError, StageResult};
use pp_transport::gpu::{DeviceRx, DeviceTx};

use pp_runtime::drift::{DigestPair, Digester};

/// Bytes of the digests of one payload, at the most.
const ROOM: usize = 8 * MAX_TENSORS;

/// Digests leases on one stream.
pub struct GpuDigester {
    /// Made only where chunks are verified. Dropped before the stream that it issues to.
    digests: Option<DeviceDigests>,
    free: Vec<Row>,
    stream: Stream,
}

/// Where the digests of one payload go: those of its seal, and behind them those that were computed. Of a seal that is
/// being made there are only the latter.
pub(super) struct Row {
    memory: Staged,
    /// The events around the work, with a time. Each makes the stream wait, 3 µs on an H200, so this is for what is seldom.
    start: Event,
    end: Event,
}

/// Digests under way.
pub struct Ticket {
    row: Row,
    count: usize,
    /// A seal that was just written is what was computed.
    is_own: bool,
}

fn device(e: impl Error + 'static) -> StageError {
    StageError::new(FaultKind::Device, "verify", with_source(&e))
}

fn internal(detail: &str) -> StageError {
    StageError::new(FaultKind::Internal, "verify", detail)
}

impl Row {
    fn new(stream: &Stream) -> Result<Self, CudaError> {
        Ok(Self {
            memory: Staged::new(stream, 2 * ROOM)?,
            start: Event::timed(stream.device())?,
            end: Event::timed(stream.device())?,
        })
    }
}

/// Work on a row is being issued. If the code that issues it panics, the row's memory still knows its use.
struct Issuing<'a>(Option<Row>, &'a Stream);

impl Drop for Issuing<'_> {
    fn drop(&mut self) {
        if let Some(row) = &self.0 {
            // Where the driver refuses, it counts as used for good.
            let _ = row.memory.is_used_by(self.1);
        }
    }
}

/// The tensors in front of the seal, and where the seal lies, in a payload that begins at `at`.
fn places(
    manifest: &Manifest,
    at: DevicePtr,
) -> Result<(Vec<DeviceTensor>, DevicePtr), StageError> {
    if !manifest.is_sealed() || (at.len as u64) < manifest.payload_bytes() {
        return Err(internal("a payload without room for its digests"));
    }
    let mut tensors: Vec<DeviceTensor> = manifest
        .iter()
        .map(|(offset, spec)| DeviceTensor {
            address: at.address + offset,
            bytes: spec.bytes(),
        })
        .collect();
    let seal = tensors.pop().expect("the last tensor is the seal");
    let seal = DevicePtr {
        address: seal.address,
        len: seal.bytes as usize,
    };
    Ok((tensors, seal))
}

impl GpuDigester {
    /// One that digests nothing before it is prepared.
    pub(super) fn new(stream: &Stream) -> Self {
        Self {
            digests: None,
            free: Vec::new(),
            stream: stream.clone(),
        }
    }

    /// Runs `issue` on a row, behind its first event; it records the second.
    fn ticket(
        &mut self,
        manifest: &Manifest,
        is_own: bool,
        issue: impl FnOnce(&DeviceDigests, &mut Row, &Stream) -> StageResult<()>,
    ) -> StageResult<Ticket> {
        let digests = self.digests.as_ref();
        let digests = digests.ok_or_else(|| internal("digests were asked for and not prepared"))?;
        let row = match self.free.pop() {
            Some(row) => row,
            None => Row::new(&self.stream).map_err(device)?,
        };
        row.start.record(&self.stream).map_err(device)?;
        let mut issuing = Issuing(Some(row), &self.stream);
        let row = issuing.0.as_mut().expect("just put there");
        let issued = issue(digests, row, &self.stream);
        let row = issuing.0.take().expect("nobody took it");
        // Also where that failed: some of it may have been issued.
        row.memory.is_used_by(&self.stream).map_err(device)?;
        issued?;
        Ok(Ticket {
            row,
            count: manifest.len().saturating_sub(1),
            is_own,
        })
    }
}

impl Digester for GpuDigester {
    type Tx = DeviceTx;
    type Rx = DeviceRx;
    type Ticket = Ticket;

    const AT_ONCE: bool = false;

    fn prepare(&mut self, most_bytes: u64, tickets: usize) -> StageResult<()> {
        let on = self.stream.device();
        on.bind().map_err(device)?;
        let (context, stream) = (on.raw_context(), self.stream.raw());
        // SAFETY: the context is the device's primary one, which lives as long as the process, and was bound to this
        // thread above; the stream is kept beside it, and dropped after it.
        let digests = unsafe { DeviceDigests::new(context, stream, most_bytes) };
        self.digests = Some(digests.map_err(device)?);
        for _ in 0..tickets {
            self.free.push(Row::new(&self.stream).map_err(device)?);
        }
        Ok(())
    }

    fn seal(&mut self, manifest: &Manifest, slot: &mut DeviceTx) -> StageResult<Ticket> {
        self.ticket(manifest, true, |digests, row, stream| {
            slot.write_on(stream, |to| {
                let (tensors, seal) = places(manifest, to)?;
                if !tensors.is_empty() {
                    // SAFETY: the edges that live on this thread have bound the context to it; the slot stays leased or
                    // in flight until the stream has passed, and no work that is issued behind this writes it; the row
                    // is kept until it is read, and if it is dropped, its memory knows its use.
                    unsafe {
                        let made = row.memory.part(0, seal.len);
                        digests.enqueue(&tensors, made.address).map_err(device)?;
                        stream.copy(made, seal).map_err(device)?;
                        let host = &mut row.memory.host;
                        stream.download(made, host, 0).map_err(device)?;
                    }
                }
                // In front of the event that says that the slot is written: whoever has read the slot knows that the
                // digests are there.
                row.end.record(stream).map_err(device)
            })
        })
    }

    fn examine(&mut self, manifest: &Manifest, payload: Option<&DeviceRx>) -> StageResult<Ticket> {
        self.ticket(manifest, false, |digests, row, stream| {
            if let Some(payload) = payload {
                payload.read_on(stream, |from| {
                    let (tensors, seal) = places(manifest, from)?;
                    if tensors.is_empty() {
                        return Ok(());
                    }
                    let computed = row.memory.part(seal.len, seal.len);
                    // SAFETY: as in `seal`; the slot goes back only behind its read event.
                    unsafe {
                        stream
                            .copy(seal, row.memory.part(0, seal.len))
                            .map_err(device)?;
                        digests
                            .enqueue(&tensors, computed.address)
                            .map_err(device)?;
                        let both = row.memory.part(0, 2 * seal.len);
                        stream
                            .download(both, &mut row.memory.host, 0)
                            .map_err(device)
                    }
                })?;
            }
            row.end.record(stream).map_err(device)
        })
    }

    fn is_there(&self, ticket: &Ticket) -> StageResult<bool> {
        ticket.row.end.is_done().map_err(device)
    }

    fn read(&mut self, ticket: Ticket) -> StageResult<DigestPair> {
        if !self.is_there(&ticket)? {
            return Err(internal("digests were read before they were there"));
        }
        let Ticket { row, count, is_own } = ticket;
        let cost_ns = row.end.elapsed_ns(&row.start).map_err(device)?;
        let part = |at: usize| Digests::from_bytes(&row.memory.host.bytes()[8 * at..][..8 * count]);
        let stated = part(0).unwrap_or_default();
        let computed = match is_own {
            true => stated,
            false => part(count).unwrap_or_default(),
        };
        self.free.push(row);
        Ok(DigestPair {
            stated,
            computed,
            cost_ns,
        })
    }

    fn drop_unread(&mut self, ticket: Ticket) {
        // Work that still writes it is on the one stream, in front of what its next user issues.
        self.free.push(ticket.row);
    }
}
