//! What of the input is given where a job goes on with one that ended early.

use std::collections::VecDeque;

use super::chunk::{Chunk, Skip};

/// Holds chunks back until the first that counts is there.
#[derive(Debug, Default)]
pub(super) struct Skipping {
    skip: Skip,
    has_begun: bool,
    /// The chunk that began the epoch, where it is not held any more.
    head: Option<Chunk>,
    /// The last chunks of the epoch, as many as are needed.
    held: VecDeque<Chunk>,
    /// Frames that were seen.
    frames: u64,
}

impl Skipping {
    pub(super) fn new(skip: Skip) -> Self {
        Self {
            skip,
            has_begun: skip.frames == 0,
            ..Self::default()
        }
    }

    /// Takes the next chunk of the input, and says which are to be given. Those that never are go to `recycle`.
    pub(super) fn take(&mut self, chunk: Chunk, recycle: impl Fn(Chunk)) -> VecDeque<Chunk> {
        if self.has_begun {
            return VecDeque::from([chunk]);
        }
        if chunk.cut {
            self.head.take().into_iter().for_each(&recycle);
            self.held.drain(..).for_each(&recycle);
        }
        let (begin, end) = (chunk.first_frame, chunk.first_frame + chunk.frames as u64);
        self.frames = end;
        self.held.push_back(chunk);
        let is_there = end > self.skip.frames;
        // The last chunk stays, since the input may end behind it.
        let until = if is_there { begin } else { end };
        while let [first, _, ..] = self.held.make_contiguous()
            && until.saturating_sub(first.first_frame + first.frames as u64) >= self.skip.context
        {
            let first = self.held.pop_front().into_iter();
            match &self.head {
                None => self.head = first.last(),
                Some(_) => first.for_each(&recycle),
            }
        }
        if is_there {
            self.begin()
        } else {
            VecDeque::new()
        }
    }

    /// The input is at its end: the chunks that are to be given, or how many frames there were, which are too few.
    pub(super) fn end(&mut self) -> Result<VecDeque<Chunk>, u64> {
        match self.frames {
            _ if self.has_begun => Ok(VecDeque::new()),
            frames if frames < self.skip.frames => Err(frames),
            _ => Ok(self.begin()),
        }
    }

    fn begin(&mut self) -> VecDeque<Chunk> {
        self.has_begun = true;
        let mut given = std::mem::take(&mut self.held);
        // Nothing is before it in this job.
        given.iter_mut().take(1).for_each(|chunk| chunk.cut = false);
        if let Some(mut head) = self.head.take() {
            (head.is_head, head.cut) = (true, false);
            given.push_front(head);
        }
        given
    }
}
