//! The frames before `--add-noise`, for the PSNR at the sink.
//!
//! Where the source stands on the same rank, it puts them on a shelf until the chunk is accepted. Elsewhere the sink reads
//! the input file a second time.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use pp_contract::{ChunkIndex, FaultKind};
use pp_runtime::stage::{StageError, StageResult};
use pp_video::psnr::LumaPsnr;
use pp_video::y4m::Reader;

use super::shape::Shape;

/// Clean frames of the chunks that are under way.
#[derive(Debug, Default)]
pub(super) struct CleanStore(RefCell<BTreeMap<u64, Vec<u8>>>);

impl CleanStore {
    /// Puts the frames of a chunk there; there may be bytes behind them.
    pub(super) fn put(&self, chunk: ChunkIndex, frames: Vec<u8>) {
        self.0.borrow_mut().insert(chunk.get(), frames);
    }

    /// Looks at them.
    pub(super) fn look<T>(&self, chunk: ChunkIndex, look: impl FnOnce(&[u8]) -> T) -> T {
        look(self.0.borrow().get(&chunk.get()).map_or(&[], Vec::as_slice))
    }

    /// Takes them back.
    pub(super) fn take(&self, chunk: ChunkIndex) -> Vec<u8> {
        self.0.borrow_mut().remove(&chunk.get()).unwrap_or_default()
    }
}

/// Where the sink finds them.
pub(super) enum CleanFrames {
    Here(Rc<CleanStore>),
    Again(Box<InputAgain>),
}

/// The input, read by the rank of the sink.
pub(super) struct InputAgain {
    reader: Reader,
    /// The number of the next frame.
    next: u64,
    frame: Vec<u8>,
}

impl CleanFrames {
    /// Opens the input of the clip a second time.
    pub(super) fn again(path: &Path, shape: &Shape) -> StageResult<Self> {
        let reader = Reader::open(path);
        let reader = reader.map_err(|e| StageError::new(e.kind(), "read input", e.to_string()))?;
        if reader.header != shape.0 {
            return Err(other(&reader, "has another header"));
        }
        let frame = vec![0; reader.header.frame_bytes()];
        Ok(Self::Again(Box::new(InputAgain {
            reader,
            next: 0,
            frame,
        })))
    }

    /// Compares decoded frames with the clean ones, of which `first` is the first of the chunk.
    pub(super) fn compare(
        &mut self,
        shape: &Shape,
        chunk: ChunkIndex,
        first: u64,
        decoded: &[u8],
    ) -> StageResult<LumaPsnr> {
        let header = &shape.0;
        let mut psnr = LumaPsnr::default();
        match self {
            Self::Here(clean) => {
                clean.look(chunk, |clean| psnr.add(header, clean, decoded));
            }
            Self::Again(input) => {
                for (number, decoded) in (first..).zip(decoded.chunks_exact(header.frame_bytes())) {
                    psnr.add(header, input.read(number)?, decoded);
                }
            }
        }
        Ok(psnr)
    }
}

impl InputAgain {
    /// The frame of this number; later ones only follow.
    fn read(&mut self, number: u64) -> StageResult<&[u8]> {
        while self.next <= number {
            let read = self.reader.read_frame(&mut self.frame);
            let read = read.map_err(|e| StageError::new(e.kind(), "read input", e.to_string()))?;
            if !read {
                return Err(other(
                    &self.reader,
                    &format!("ends earlier, before frame {number},"),
                ));
            }
            self.next += 1;
        }
        Ok(&self.frame)
    }
}

/// The file is not what rank 0 reads.
fn other(reader: &Reader, how: &str) -> StageError {
    let detail = format!(
        "{} {how} on the rank of the sink than on rank 0; with --add-noise both read the same file",
        reader.name
    );
    StageError::new(FaultKind::BadInput, "read input", detail)
}
