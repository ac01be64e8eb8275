//! What is done with messages, wherever the payloads of a backend lie.

use pp_runtime::stage::{Progress, StageResult};

use super::book::{Passage, Wrong};

/// Room in a slot for the digest and the gap before it.
pub(super) const DIGEST_ROOM: u64 = 512;
/// What a poisoned slot holds.
pub(super) const POISON: u8 = 0xa5;

/// What works on messages where the payloads of a backend lie.
pub(super) trait Words {
    type Tx;
    type Rx;
    /// A message that a device reads.
    type Read;

    /// What keeps the device busy, and why something does not.
    fn beside(&self) -> (&[&'static str], Option<&str>) {
        (&[], None)
    }

    /// Writes a passage.
    fn write(&mut self, passage: Passage, slot: &mut Self::Tx) -> StageResult<()>;

    /// Copies the words on, and adds their digest at `digest_at`.
    fn echo(
        &mut self,
        passage: Passage,
        input: &Self::Rx,
        digest_at: usize,
        output: &mut Self::Tx,
    ) -> StageResult<()>;

    /// Compares an answer, whose digest lies at `digest_at`, with the book.
    fn check(
        &mut self,
        passage: Passage,
        input: &Self::Rx,
        digest_at: usize,
    ) -> StageResult<Progress<Wrong, Self::Read>>;

    /// How far the oldest comparison is.
    fn poll(&mut self, oldest: Self::Read) -> StageResult<Progress<Wrong, Self::Read>> {
        Ok(Progress::UnderWay(oldest))
    }
}
