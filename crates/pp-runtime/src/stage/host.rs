//! Stages that work at once, in host memory.

use std::convert::Infallible;
use std::marker::PhantomData;

use pp_contract::{FaultKind, Plan};
use pp_transport::error::TransportError;
use pp_transport::host::{RxLease, TxLease};

use super::{Chunk, Done, Progress, Stage, StageError, StageResult};

/// Gives the first `bytes` of a slot, to be written.
///
/// # Errors
/// The slot is smaller: [`FaultKind::Usage`], with both sizes.
pub fn first_bytes(slot: &mut [u8], bytes: usize) -> StageResult<&mut [u8]> {
    let slot_bytes = slot.len();
    slot.get_mut(..bytes).ok_or_else(|| {
        let too_large = TransportError::TooLarge {
            payload_bytes: bytes as u64,
            slot_bytes,
        };
        StageError::new(FaultKind::Usage, "write a payload", too_large.to_string())
    })
}

/// A stage that works at once, on the host: from the bytes that came into those that go on.
#[derive(Clone, Copy, Debug)]
pub struct OnHost<P, F>(F, PhantomData<P>);

impl<P: Plan, F> OnHost<P, F>
where
    F: FnMut(Chunk<'_, P>, &[u8], &mut [u8]) -> StageResult<Done>,
{
    /// Works with this closure. The bytes that go on are a whole slot, as large as the program has said; what the manifest
    /// does not name is not sent. [`first_bytes`] checks that a payload fits.
    pub fn new(run: F) -> Self {
        Self(run, PhantomData)
    }
}

impl<P: Plan, F> Stage<TxLease, RxLease> for OnHost<P, F>
where
    F: FnMut(Chunk<'_, P>, &[u8], &mut [u8]) -> StageResult<Done>,
{
    type Plan = P;
    type Kept = Infallible;

    fn run(
        &mut self,
        chunk: Chunk<'_, P>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> StageResult<Progress<Done, Infallible>> {
        let input = input.map_or(&[][..], RxLease::bytes);
        Ok(Progress::Done((self.0)(chunk, input, output.bytes_mut())?))
    }
}
