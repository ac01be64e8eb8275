//! Digests in memory that the processor reads.

use std::time::Instant;

use pp_contract::{Digests, FaultKind, Manifest};
use pp_transport::host::{RxLease, TxLease};

use super::{DigestPair, Digester};
use crate::stage::StageError;

/// Digests leases' bytes in place.
#[derive(Debug, Default)]
pub struct HostDigester;

/// A payload that is shorter than its manifest: no edge lets one through.
fn short(manifest: &Manifest, bytes: usize) -> StageError {
    let expected = manifest.payload_bytes();
    let detail =
        format!("a payload of {bytes} bytes, its tensors and their digests take {expected}");
    StageError::new(FaultKind::Internal, "verify", detail)
}

fn since(start: Instant) -> u64 {
    start.elapsed().as_nanos() as u64
}

impl Digester for HostDigester {
    type Tx = TxLease;
    type Rx = RxLease;
    type Ticket = DigestPair;

    const AT_ONCE: bool = true;

    fn prepare(&mut self, _: u64, _: usize) -> Result<(), StageError> {
        Ok(())
    }

    fn seal(&mut self, manifest: &Manifest, slot: &mut TxLease) -> Result<DigestPair, StageError> {
        let start = Instant::now();
        let bytes = slot.bytes_mut();
        let there = bytes.len();
        let computed = manifest.seal(bytes).ok_or_else(|| short(manifest, there))?;
        Ok(DigestPair {
            stated: computed,
            computed,
            cost_ns: since(start),
        })
    }

    fn examine(
        &mut self,
        manifest: &Manifest,
        payload: Option<&RxLease>,
    ) -> Result<DigestPair, StageError> {
        let start = Instant::now();
        let bytes = payload.map_or(&[][..], RxLease::bytes);
        let refuse = || short(manifest, bytes.len());
        Ok(DigestPair {
            stated: manifest.stated(bytes).ok_or_else(refuse)?,
            computed: Digests::of(&manifest.unsealed(), bytes).ok_or_else(refuse)?,
            cost_ns: since(start),
        })
    }

    fn is_there(&self, _: &DigestPair) -> Result<bool, StageError> {
        Ok(true)
    }

    fn read(&mut self, ticket: DigestPair) -> Result<DigestPair, StageError> {
        Ok(ticket)
    }

    fn drop_unread(&mut self, _: DigestPair) {}
}
