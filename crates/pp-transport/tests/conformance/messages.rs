//! The smallest plan there is, and messages with payloads of any size.

use pp_contract::{
    CacheEpoch, ChunkIndex, Composer, DType, Envelope, Manifest, Plan, PlanError, Prepared, Stamp,
    TensorSpec,
};

/// A plan that says nothing but its number.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Blob(u64);

impl Plan for Blob {
    const NAME: &'static str = "blob";
    const VERSION: u16 = 1;
    type Parts = u64;

    fn from_parts(parts: u64) -> Result<Self, PlanError> {
        Ok(Self(parts))
    }
    fn parts(&self) -> &u64 {
        &self.0
    }
    fn expected_calls(&self) -> u32 {
        1
    }
    fn start_frame(&self) -> u64 {
        self.0
    }
    fn check_inputs(&self, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
    fn check_outputs(&self, _: &Manifest, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
}

/// Message number `n` with a payload of `bytes`.
pub(crate) fn prepare(composer: &mut Composer, n: u64, bytes: usize) -> (Prepared<'_>, Stamp) {
    let spec = TensorSpec::new("blob", DType::U8, &[bytes as u64]).unwrap();
    let inputs = Manifest::new(&[spec]).unwrap();
    let envelope = Envelope::new(Blob(n), inputs, Manifest::empty()).unwrap();
    let stamp = Stamp::fresh(ChunkIndex::new(n), CacheEpoch::new(0));
    (composer.prepare_envelope(&envelope).unwrap(), stamp)
}

/// Number in a message.
pub(crate) fn number(matched: &pp_contract::Matched<'_>) -> u64 {
    matched.envelope::<Blob>().unwrap().plan().0
}

/// Byte `i` of payload `n`: any mix-up of messages or offsets shows.
pub(crate) fn pattern(n: u64, i: usize) -> u8 {
    (n.wrapping_mul(31) as usize ^ i ^ (i >> 8) ^ (i >> 16)) as u8
}
