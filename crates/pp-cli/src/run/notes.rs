//! What source and sink tell each other of a chunk, beside plan and tensors.

use pp_contract::{FaultKind, MAX_NOTE_BYTES, Rank, Seal};
use pp_job::RANK_0;
use pp_runtime::stage::{StageError, StageResult};
use pp_video::psnr::LumaPsnr;
use pp_video::y4m::Params;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// From the source to the sink. The stages between read how many frames there are.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ToSink {
    /// Frames of the chunk.
    pub(super) frames: u32,
    /// Frames of the input that were dropped before it.
    pub(super) skipped: u64,
    /// A digest of the first chunk of the input.
    pub(super) input: u64,
    /// What stood in front of them.
    pub(super) params: Params,
}

/// From the sink to the source.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ToSource {
    /// The frames that it made of the chunk.
    pub(super) made: Made,
    /// The decoded frames against the clean ones, where those are known.
    pub(super) after: Option<LumaPsnr>,
    /// What each stage behind the source says of digests; none for a chunk that is not verified.
    pub(super) seals: Vec<Seal>,
}

/// Frames that a sink made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Made {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) frames: u64,
}

fn encoded(note: &impl Serialize) -> StageResult<Vec<u8>> {
    let refuse =
        |e: postcard::Error| StageError::new(FaultKind::Internal, "encode a note", e.to_string());
    postcard::to_allocvec(note).map_err(refuse)
}

/// Reads what stage `of` on this rank has written.
fn decoded<T: DeserializeOwned>(note: &[u8], of: Rank) -> StageResult<T> {
    postcard::from_bytes(note).map_err(|_| bad(of, "cannot be read"))
}

fn bad(of: Rank, what: &str) -> StageError {
    let detail = format!("the note of rank {of} about a chunk {what}");
    StageError::new(FaultKind::PeerMisbehaved, "read a note", detail).blaming(of)
}

/// How many frames a chunk has, which has `most` at most.
pub(super) fn frames(note: &[u8], most: u32) -> StageResult<u32> {
    let frames = postcard::take_from_bytes::<u32>(note);
    let frames = frames.map_err(|_| bad(RANK_0, "cannot be read"))?.0;
    if !(1..=most).contains(&frames) {
        let what = format!("says that it has {frames} frames; 1 to {most} can be");
        return Err(bad(RANK_0, &what));
    }
    Ok(frames)
}

impl ToSink {
    /// As it travels with chunk `index`.
    pub(super) fn encode(&self, index: u64) -> StageResult<Vec<u8>> {
        let note = encoded(self)?;
        if note.len() > MAX_NOTE_BYTES {
            let detail = format!(
                "chunk {index}: the parameters of its FRAME lines take {} bytes, and {MAX_NOTE_BYTES} travel with a chunk; \
                 lower --frames-per-chunk",
                note.len()
            );
            return Err(StageError::new(FaultKind::BadInput, "read input", detail));
        }
        Ok(note)
    }

    /// What the source says of a chunk, which has `most` frames at most.
    pub(super) fn decode(note: &[u8], most: u32) -> StageResult<Self> {
        let frames = frames(note, most)?;
        let said: Self = decoded(note, RANK_0)?;
        let fits = |(at, text): &(usize, Vec<u8>)| *at < frames as usize && !text.contains(&b'\n');
        if !said.params.iter().all(fits) {
            return Err(bad(RANK_0, "has parameters that no frame can have"));
        }
        Ok(said)
    }
}

impl ToSource {
    /// As it travels.
    pub(super) fn encode(&self) -> StageResult<Vec<u8>> {
        encoded(self)
    }

    /// What the sink says of a chunk, with so many seals.
    pub(super) fn decode(note: &[u8], seals: usize, sink: Rank) -> StageResult<Self> {
        let said: Self = decoded(note, sink)?;
        if said.seals.len() != seals {
            let what = format!("has {} seals, and {seals} were due", said.seals.len());
            return Err(bad(sink, &what));
        }
        Ok(said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_of_the_source_is_read_by_all_stages() {
        let note = ToSink {
            frames: 3,
            skipped: 70_000,
            input: 7,
            params: vec![(1, b" Xa".to_vec())],
        };
        let travels = note.encode(0).unwrap();
        assert_eq!(frames(&travels, 4), Ok(3));
        assert_eq!(ToSink::decode(&travels, 4), Ok(note));
    }

    #[test]
    fn note_that_cannot_be_is_refused_and_blames_its_writer() {
        let note = |frames, params| {
            let note = ToSink {
                frames,
                skipped: 0,
                input: 0,
                params,
            };
            note.encode(0).unwrap()
        };
        for (note, words) in [
            (note(5, vec![]), "has 5 frames; 1 to 4"),
            (note(0, vec![]), "has 0 frames"),
            (note(2, vec![(2, vec![])]), "no frame can have"),
            (
                note(2, vec![(0, b" a\nFRAME".to_vec())]),
                "no frame can have",
            ),
            (vec![], "cannot be read"),
            (vec![1, 200], "cannot be read"),
        ] {
            let error = ToSink::decode(&note, 4).unwrap_err();
            assert!(error.detail.contains(words), "{error}");
            assert_eq!(error.blames, Some(RANK_0));
        }
        let said = ToSource {
            made: Made::default(),
            after: None,
            seals: vec![Seal::default()],
        };
        let error = ToSource::decode(&said.encode().unwrap(), 2, Rank::new(3)).unwrap_err();
        assert_eq!(error.blames, Some(Rank::new(3)));
    }

    #[test]
    fn parameters_that_are_too_long_are_refused_with_the_remedy() {
        let params = (0..20).map(|at| (at, vec![b'x'; 250])).collect();
        let note = ToSink {
            frames: 20,
            skipped: 0,
            input: 0,
            params,
        };
        let error = note.encode(7).unwrap_err();
        assert!(error.detail.contains("chunk 7") && error.detail.contains("--frames-per-chunk"));
        assert_eq!(error.kind, FaultKind::BadInput);
    }
}
