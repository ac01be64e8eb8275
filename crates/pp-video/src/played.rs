//! What a run played of its input: which frames are missing, and the steps of each chunk. A report has it, and a later run
//! plays it again.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::source::Chunk;

/// Entries that each list has at most.
const MOST: usize = 1 << 16;

/// Gaps and steps, each as a list that ends where it is full. `docs/report.md` says what each key is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Played {
    /// The first missing frame, and how many are missing.
    gaps: VecDeque<(u64, u64)>,
    /// Steps, and how many chunks after each other had so many.
    steps: VecDeque<(u32, u64)>,
    /// Chunks that are in neither list.
    chunks_left_out: u64,
}

impl Played {
    /// Notes a chunk and its steps.
    pub fn note(&mut self, chunk: &Chunk, steps: u32) {
        let is_full = self.gaps.len() == MOST || self.steps.len() == MOST;
        if self.chunks_left_out > 0 || is_full {
            self.chunks_left_out += 1;
            return;
        }
        if chunk.skipped > 0 {
            let first = chunk.first_frame.saturating_sub(chunk.skipped);
            self.gaps.push_back((first, chunk.skipped));
        }
        match self.steps.back_mut() {
            Some((same, chunks)) if *same == steps => *chunks += 1,
            _ => self.steps.push_back((steps, 1)),
        }
    }

    /// Says whether the lists have every chunk of the run.
    pub fn is_whole(&self) -> bool {
        self.chunks_left_out == 0
    }

    /// The steps in it.
    pub fn steps(&self) -> impl Iterator<Item = u32> {
        self.steps.iter().map(|(steps, _)| *steps)
    }

    /// Counts its chunks that were not taken out.
    pub fn chunks(&self) -> u64 {
        self.steps.iter().map(|(_, chunks)| *chunks).sum()
    }

    /// Takes out the steps of the next chunk of the input; none where its frames are missing in the run.
    ///
    /// # Errors
    /// Some are missing and some are not: this is another input, or it was cut into chunks in another way.
    pub fn take(&mut self, chunk: &Chunk) -> Result<Option<u32>, String> {
        let (first, end) = (chunk.first_frame, chunk.first_frame + chunk.frames as u64);
        let gap_end = |(at, count): &(u64, u64)| at.saturating_add(*count);
        while self.gaps.front().is_some_and(|gap| gap_end(gap) <= first) {
            self.gaps.pop_front();
        }
        match self.gaps.front() {
            Some(gap) if gap.0 <= first && end <= gap_end(gap) => return Ok(None),
            Some(gap) if gap.0 < end => {
                let (from, to) = (gap.0, gap_end(gap));
                return Err(format!(
                    "frames {from} to {to} are missing in the run, and a chunk here has frames {first} to {end}"
                ));
            }
            _ => {}
        }
        let Some((steps, chunks)) = self.steps.front_mut() else {
            return Err("the run has no more chunks".into());
        };
        let steps = *steps;
        *chunks = chunks.saturating_sub(1);
        if *chunks == 0 {
            self.steps.pop_front();
        }
        Ok(Some(steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(first_frame: u64, skipped: u64) -> Chunk {
        let mut chunk = Chunk::default();
        (chunk.first_frame, chunk.frames, chunk.skipped) = (first_frame, 4, skipped);
        chunk
    }

    fn played() -> Played {
        let mut played = Played::default();
        for (first, skipped, steps) in [(4, 4, 2), (8, 0, 2), (20, 8, 1)] {
            played.note(&chunk(first, skipped), steps);
        }
        played
    }

    #[test]
    fn what_was_played_is_played_again() {
        let text = serde_json::to_string(&played()).unwrap();
        assert!(
            text.contains("[[0,4],[12,8]]") && text.contains("[[2,2],[1,1]]"),
            "{text}"
        );
        let mut again: Played = serde_json::from_str(&text).unwrap();
        assert_eq!((again.chunks(), again.is_whole()), (3, true));
        let steps: Vec<_> = (0..6)
            .map(|k| again.take(&chunk(4 * k, 0)).unwrap())
            .collect();
        assert_eq!(steps, [None, Some(2), Some(2), None, None, Some(1)]);
        assert_eq!(again.chunks(), 0);
        assert!(again.take(&chunk(24, 0)).is_err());
    }

    #[test]
    fn chunks_that_do_not_fit_are_refused() {
        let why = played().take(&chunk(2, 0)).unwrap_err();
        assert!(
            why.contains("frames 0 to 4 are missing") && why.contains("frames 2 to 6"),
            "{why}"
        );
    }

    #[test]
    fn the_lists_are_bounded() {
        let mut played = Played::default();
        (0..MOST as u64 + 9).for_each(|k| played.note(&chunk(8 * k + 4, 4), 3));
        assert_eq!((played.gaps.len(), played.chunks()), (MOST, MOST as u64));
        assert_eq!((played.chunks_left_out, played.is_whole()), (9, false));
    }
}
