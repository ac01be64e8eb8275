//! Messages in the memory of a GPU. The work on a message is issued to one stream; no thread waits for it.

use std::error::Error as StdError;
use std::rc::Rc;

use pp_contract::{FaultKind, with_source};
use pp_device::{CudaError, Device, DevicePtr, Event, PinnedBuffer, Stream, StreamBuffer};
use pp_kernels::synthetic::{Kind, Work};
use pp_kernels::{DeviceDigests, DeviceTensor, Failure};
use pp_runtime::stage::{Progress, StageError, StageResult};
use pp_transport::gpu::{DeviceRx, DeviceTx};

use super::book::{Book, Passage, Wrong};
use super::work::{DIGEST_ROOM, POISON, Words};

/// Bytes of a digest.
const DIGEST_BYTES: usize = 8;
/// Rows and columns of the matrices that are multiplied beside the messages.
const MATRIX: u32 = 4096;
/// So many messages have the same work beside them.
const TURN: u64 = 256;

fn device(error: impl StdError + 'static) -> StageError {
    StageError::new(FaultKind::Device, "read words", with_source(&error))
}

pub(super) struct OnGpu {
    // Dropped before the stream that they issue to.
    digests: DeviceDigests,
    text: StreamBuffer,
    free: Vec<Row>,
    beside: Beside,
    stream: Stream,
    book: Rc<Book>,
    max_bytes: u64,
}

/// Where an answer goes, and behind it its digest and that of the book.
pub(super) struct Row {
    digests: StreamBuffer,
    host: PinnedBuffer,
    done: Event,
}

impl Row {
    fn new(stream: &Stream, max_bytes: u64) -> Result<Self, CudaError> {
        let on = stream.device();
        Ok(Self {
            digests: StreamBuffer::new(stream, 2 * DIGEST_BYTES)?,
            host: PinnedBuffer::new(on, (max_bytes + 2 * DIGEST_ROOM) as usize)?,
            done: Event::new(on)?,
        })
    }
}

/// An answer that is read.
pub(super) struct Read {
    row: Row,
    passage: Passage,
    digest_at: usize,
}

impl OnGpu {
    pub(super) fn open(on: &Device, book: &Rc<Book>, max_bytes: u64) -> StageResult<Self> {
        on.bind().map_err(device)?;
        let stream = Stream::new(on).map_err(device)?;
        let text = StreamBuffer::new(&stream, book.bytes().len()).map_err(device)?;
        text.fill_with(book.bytes().to_vec()).map_err(device)?;
        // SAFETY: the context is the device's primary one, which lives as long as the process, and was bound to this
        // thread above; the stream is kept beside the digests, and dropped after them.
        let digests = unsafe { DeviceDigests::new(on.raw_context(), stream.raw(), 2 * max_bytes) };
        Ok(Self {
            digests: digests.map_err(device)?,
            text,
            free: Vec::new(),
            beside: Beside::new(on, max_bytes).map_err(device)?,
            stream,
            book: Rc::clone(book),
            max_bytes,
        })
    }

    /// The words in the book on the device.
    fn words(&self, passage: Passage) -> DevicePtr {
        DevicePtr {
            address: self.text.address() + passage.at as u64,
            len: passage.bytes,
        }
    }
}

/// Does both, by turns one before the other.
fn by_turns<E>(
    passage: Passage,
    mut one: impl FnMut() -> Result<(), E>,
    mut other: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    match passage.number.is_multiple_of(2) {
        true => one().and_then(|()| other()),
        false => other().and_then(|()| one()),
    }
}

fn part(of: DevicePtr, at: usize, len: usize) -> DevicePtr {
    let address = of.address + at as u64;
    DevicePtr { address, len }
}

fn tensor(of: DevicePtr) -> DeviceTensor {
    DeviceTensor {
        address: of.address,
        bytes: of.len as u64,
    }
}

impl Words for OnGpu {
    type Tx = DeviceTx;
    type Rx = DeviceRx;
    type Read = Read;

    fn beside(&self) -> (&[&'static str], Option<&str>) {
        (&self.beside.names, self.beside.missing.as_deref())
    }

    fn write(&mut self, passage: Passage, slot: &mut DeviceTx) -> StageResult<()> {
        self.beside.stir(passage.number)?;
        let (stream, words) = (&self.stream, self.words(passage));
        slot.write_on(stream, |to| {
            // SAFETY: the slot is leased, and holds the words, which the runtime has sized it for; nothing writes the book.
            unsafe {
                let to = part(to, 0, words.len);
                stream.fill(to, POISON).map_err(device)?;
                stream.copy(words, to).map_err(device)
            }
        })
    }

    fn echo(
        &mut self,
        passage: Passage,
        input: &DeviceRx,
        digest_at: usize,
        output: &mut DeviceTx,
    ) -> StageResult<()> {
        self.beside.stir(passage.number)?;
        let stream = &self.stream;
        input.read_on(stream, |from| {
            output.write_on(stream, |to| {
                let words = part(from, 0, passage.bytes);
                let (copy, digest) = (part(to, 0, words.len), part(to, digest_at, DIGEST_BYTES));
                // SAFETY: both slots are leased until the stream has passed, and hold the words, and that which goes on
                // the digest behind them. The one that came is this rank's own memory, which its sender writes again
                // behind its credit alone.
                unsafe {
                    stream.fill(copy, POISON).map_err(device)?;
                    let digests = &self.digests;
                    by_turns(
                        passage,
                        || {
                            digests
                                .enqueue(&[tensor(words)], digest.address)
                                .map_err(device)
                        },
                        || stream.copy(words, copy).map_err(device),
                    )?;
                    stream.fill(from, POISON).map_err(device)
                }
            })
        })
    }

    fn check(
        &mut self,
        passage: Passage,
        input: &DeviceRx,
        digest_at: usize,
    ) -> StageResult<Progress<Wrong, Read>> {
        let (stream, book) = (&self.stream, self.words(passage));
        let mut row = match self.free.pop() {
            Some(row) => row,
            None => Row::new(stream, self.max_bytes).map_err(device)?,
        };
        let Row {
            digests,
            host,
            done,
        } = &mut row;
        let issued = input.read_on(stream, |from| {
            let words = part(from, 0, passage.bytes);
            // SAFETY: the slot is leased until the stream has passed, and is this rank's own memory, which its sender
            // writes again behind its credit alone. The row is kept until its event is done; where it is dropped before,
            // its page-locked memory knows its use, and the rest is freed in the order of the stream.
            unsafe {
                by_turns(
                    passage,
                    || {
                        let both = [tensor(words), tensor(book)];
                        self.digests
                            .enqueue(&both, digests.address())
                            .map_err(device)
                    },
                    || stream.download(from, host, 0).map_err(device),
                )?;
                stream
                    .download(digests.ptr(), host, from.len)
                    .map_err(device)?;
                stream.fill(from, POISON).map_err(device)
            }
        });
        // Also where that failed: some of it may have been issued.
        host.used_by(stream).map_err(device)?;
        issued?;
        done.record(stream).map_err(device)?;
        Ok(Progress::UnderWay(Read {
            row,
            passage,
            digest_at,
        }))
    }

    fn poll(&mut self, oldest: Read) -> StageResult<Progress<Wrong, Read>> {
        if !oldest.row.done.is_done().map_err(device)? {
            return Ok(Progress::UnderWay(oldest));
        }
        let Read {
            row,
            passage,
            digest_at,
        } = oldest;
        let bytes = row.host.bytes();
        let number = |at: usize| {
            let digest = bytes[at..].first_chunk().expect("room for digests");
            u64::from_le_bytes(*digest)
        };
        // Rank 1's is the end of the answer; ours and that of the book lie behind it.
        let [there, here, right] = [0, 1, 2].map(|at| number(digest_at + at * DIGEST_BYTES));
        let words = &bytes[..passage.bytes];
        let wrong = self.book.compare(passage, words, [here, there], right);
        self.free.push(row);
        Ok(Progress::Done(wrong))
    }
}

/// Work that keeps the GPU busy.
struct Beside {
    works: Vec<(Work, Stream)>,
    names: Vec<&'static str>,
    missing: Option<String>,
}

impl Beside {
    /// A stream through eight times the largest message, and matrix products where there is a library for them.
    fn new(on: &Device, max_bytes: u64) -> Result<Self, Failure> {
        let mut beside = Self {
            works: Vec::new(),
            names: Vec::new(),
            missing: None,
        };
        let bytes = (8 * max_bytes).next_multiple_of(4096);
        let kinds = [
            ("hbm", Kind::Hbm { bytes }),
            ("gemm", Kind::Gemm { size: MATRIX }),
        ];
        for (name, kind) in kinds {
            let stream = Stream::new(on)?;
            // SAFETY: the context is the device's primary one, which lives as long as the process and is bound to this
            // thread; the stream is kept beside the work, and dropped after it.
            match unsafe { Work::new(kind, on.raw_context(), stream.raw()) } {
                Ok(work) => {
                    beside.works.push((work, stream));
                    beside.names.push(name);
                }
                Err(why) if name == "gemm" => beside.missing = Some(with_source(&why)),
                Err(why) => return Err(why),
            }
        }
        Ok(beside)
    }

    /// Issues work again that is done: none beside the first messages, then one, then the other, then both.
    fn stir(&mut self, number: u64) -> StageResult<()> {
        for (at, (work, stream)) in self.works.iter_mut().enumerate() {
            let is_due = (number / TURN) >> at & 1 == 1;
            if is_due && stream.is_idle().map_err(device)? {
                work.launch().map_err(device)?;
            }
        }
        Ok(())
    }
}
