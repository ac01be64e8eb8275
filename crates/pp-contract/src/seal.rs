//! A sealed payload: its last tensor holds the digests of the others.
//!
//! *Hazard.* On a GPU the host does not know the digest of a payload when its header leaves: the encode has only been
//! issued.
//! *Guarantee.* The digests travel with what they are of, in one payload, on every backend, and no message waits for them.
//! *Choices.* A tensor of its own behind the others, so that a payload that is not sealed is what it was, byte for byte.

use crate::digest::Digests;
use crate::dtype::DType;
use crate::manifest::{Manifest, ManifestError, TensorSpec};
use serde::{Deserialize, Serialize};

/// The name of the tensor that seals a payload: `i64`, one element (64 bits, unsigned) for each tensor before it.
pub const SEAL_TENSOR: &str = "digests";

/// What the stage that made sealed tensors says of them in its report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Seal {
    /// [`Digests::seal`] of the digests as they were computed: whether it is they that changed on the way.
    pub digest: u64,
    /// What computing and comparing digests took for this chunk, in microseconds.
    pub cost_us: u64,
}

impl Manifest {
    /// These tensors, and behind them the one with their digests.
    ///
    /// # Errors
    /// [`ManifestError::TooMany`], [`ManifestError::TooLarge`]; [`ManifestError::Twice`] when it is sealed already.
    pub fn sealed(&self) -> Result<Self, ManifestError> {
        let mut specs: Vec<TensorSpec> = self.iter().map(|(_, spec)| *spec).collect();
        specs.push(TensorSpec::new(
            SEAL_TENSOR,
            DType::I64,
            &[self.len() as u64],
        )?);
        Self::new(&specs)
    }

    /// Says whether the last tensor holds the digests of the others.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.iter().last().is_some_and(|(_, spec)| {
            spec.name() == SEAL_TENSOR
                && spec.dtype() == DType::I64
                && spec.shape().dims() == [self.len() as u64 - 1]
        })
    }

    /// The tensors in front of the seal; all, where there is none.
    #[must_use]
    pub fn unsealed(&self) -> Self {
        if self.is_sealed() {
            self.first(self.len() - 1)
        } else {
            self.clone()
        }
    }

    /// The digests that a sealed payload states; `None` when it has no seal, or is shorter than that.
    #[must_use]
    pub fn stated(&self, payload: &[u8]) -> Option<Digests> {
        let range = self.is_sealed().then(|| self.range(SEAL_TENSOR))??;
        Digests::from_bytes(payload.get(range)?)
    }

    /// Computes the digests of a payload and writes them into its seal; `None` as above.
    pub fn seal(&self, payload: &mut [u8]) -> Option<Digests> {
        let range = self.is_sealed().then(|| self.range(SEAL_TENSOR))??;
        let digests = Digests::of(&self.unsealed(), payload)?;
        digests.write_to(payload.get_mut(range)?).then_some(digests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let spec = |name, dims| TensorSpec::new(name, DType::U8, &[dims]).unwrap();
        Manifest::new(&[spec("a", 300), spec("b", 2)]).unwrap()
    }

    #[test]
    fn seal_lies_behind_the_others_and_comes_off_again() {
        let sealed = manifest().sealed().unwrap();
        assert_eq!(sealed.offset(2), Some(768));
        assert_eq!(sealed.payload_bytes(), 768 + 16);
        assert!(sealed.is_sealed() && !manifest().is_sealed());
        assert_eq!(sealed.unsealed(), manifest());
        assert_ne!(sealed.unsealed(), sealed);
        assert_eq!(manifest().unsealed(), manifest());
        assert!(sealed.sealed().is_err());
        assert!(Manifest::empty().sealed().unwrap().is_sealed());
    }

    #[test]
    fn what_only_looks_like_a_seal_is_none() {
        let a = TensorSpec::new("a", DType::U8, &[1]).unwrap();
        for seal in [
            TensorSpec::new(SEAL_TENSOR, DType::U8, &[8]).unwrap(),
            TensorSpec::new(SEAL_TENSOR, DType::I64, &[2]).unwrap(),
            TensorSpec::new(SEAL_TENSOR, DType::I64, &[1, 1]).unwrap(),
        ] {
            assert!(!Manifest::new(&[a, seal]).unwrap().is_sealed(), "{seal}");
        }
        let seal = TensorSpec::new(SEAL_TENSOR, DType::I64, &[0]).unwrap();
        assert!(!Manifest::new(&[seal, a]).unwrap().is_sealed());
    }

    #[test]
    fn changed_tensor_is_told_from_a_changed_seal() {
        let sealed = manifest().sealed().unwrap();
        let mut payload: Vec<u8> = (0..784u32).map(|i| (i * 7) as u8).collect();
        let digests = sealed.seal(&mut payload).unwrap();
        assert_eq!(sealed.stated(&payload), Some(digests));
        let found = |payload: &[u8]| Digests::of(&sealed.unsealed(), payload).unwrap();
        assert_eq!(found(&payload).first_difference(&digests), None);
        payload[299] ^= 1;
        assert_eq!(found(&payload).first_difference(&digests), Some(0));
        payload[299] ^= 1;
        payload[768 + 8] ^= 1;
        let stated = sealed.stated(&payload).unwrap();
        assert_eq!(found(&payload).first_difference(&stated), Some(1));
        assert_ne!(stated.seal(), digests.seal());
        assert_eq!(sealed.stated(&payload[..783]), None);
        assert_eq!(manifest().stated(&payload), None);
    }
}
