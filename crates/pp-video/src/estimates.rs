//! The noise that the kernels of the source estimated, as it stands in the payloads that they wrote.

use std::ops::Range;

use pp_contract::{DType, Manifest, VideoPlanParts};
use pp_kernels::Chroma;
use serde::Serialize;

/// Says where a payload tells how much noise its frames have: the standard deviation of each plane. The built-in kernels put it
/// there; `None` where they do not estimate it anew in this chunk, or a plugin lays the tensor out in another way.
pub fn place(plan: &VideoPlanParts, tensors: &Manifest, chroma: Chroma) -> Option<Range<usize>> {
    let is_estimated = plan.init_cache || plan.reset_crossattn_cache;
    let (_, spec) = tensors.get("conditioning_embeds")?;
    let is_known = spec.dtype() == DType::Bf16 && spec.shape().dims() == [chroma.planes() as u64];
    tensors
        .range(spec.name())
        .filter(|_| is_estimated && is_known)
}

/// Reads standard deviations in bf16; `None` where one of them is none.
pub fn sigmas(bytes: &[u8]) -> Option<Vec<f32>> {
    let sigma = |two: &[u8]| f32::from_bits(u32::from_le_bytes([0, 0, two[0], two[1]]));
    let sigmas: Vec<f32> = bytes.chunks_exact(2).map(sigma).collect();
    let are_sigmas = sigmas.iter().all(|sigma| (0.0..=255.0).contains(sigma));
    are_sigmas.then_some(sigmas)
}

/// What was estimated in each epoch, plane by plane.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Estimates {
    epochs: u64,
    first: Vec<f32>,
    least: Vec<f32>,
    most: Vec<f32>,
}

impl Estimates {
    /// Takes in what was estimated in one epoch: the standard deviation of each plane.
    pub fn note(&mut self, sigmas: Vec<f32>) {
        self.epochs += 1;
        if self.epochs == 1 {
            (self.least, self.most) = (sigmas.clone(), sigmas.clone());
            self.first = sigmas;
            return;
        }
        for (plane, sigma) in sigmas.into_iter().enumerate() {
            self.least[plane] = self.least[plane].min(sigma);
            self.most[plane] = self.most[plane].max(sigma);
        }
    }
}

impl std::fmt::Display for Estimates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let planes = |sigmas: &[f32]| {
            let sigmas: Vec<_> = sigmas.iter().map(|sigma| format!("{sigma:.1}")).collect();
            sigmas.join(", ")
        };
        write!(f, "sigma {}", planes(&self.first))?;
        if self.least != self.most {
            let (least, most) = (planes(&self.least), planes(&self.most));
            write!(
                f,
                " at first, from {least} to {most} in {} scenes",
                self.epochs
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use pp_contract::TensorSpec;

    use super::*;

    fn bf16(values: &[f32]) -> Vec<u8> {
        let two = |value: &f32| value.to_bits().to_le_bytes()[2..].to_vec();
        values.iter().flat_map(two).collect()
    }

    #[test]
    fn the_tensor_is_read_where_it_is_laid_out_as_ours() {
        for (dtype, dims, expected) in [
            (DType::Bf16, &[3][..], Some(256..262)),
            (DType::Bf16, &[1], None),
            (DType::Bf16, &[3, 1], None),
            (DType::F16, &[3], None),
        ] {
            let specs = [
                TensorSpec::new("latents_in", DType::U8, &[9]).unwrap(),
                TensorSpec::new("conditioning_embeds", dtype, dims).unwrap(),
            ];
            let tensors = Manifest::new(&specs).unwrap();
            let first = VideoPlanParts::first(16, 16, 4);
            assert_eq!(
                place(&first, &tensors, Chroma::C420),
                expected,
                "{dtype:?} {dims:?}"
            );
        }
    }

    #[test]
    fn a_sigma_out_of_range_gives_no_estimate() {
        assert_eq!(
            sigmas(&bf16(&[0.0, 20.0, 255.0])),
            Some(vec![0.0, 20.0, 255.0])
        );
        for bad in [-1.0, 256.0, f32::NAN, f32::INFINITY] {
            assert_eq!(sigmas(&bf16(&[20.0, bad])), None, "{bad}");
        }
    }

    #[test]
    fn the_first_estimate_stands_beside_the_range_over_all() {
        let mut estimates = Estimates::default();
        estimates.note(vec![20.125, 4.0]);
        assert_eq!(estimates.to_string(), "sigma 20.1, 4.0");
        estimates.note(vec![18.0, 4.0]);
        estimates.note(vec![19.0, 5.0]);
        assert_eq!(
            estimates.to_string(),
            "sigma 20.1, 4.0 at first, from 18.0, 4.0 to 20.1, 5.0 in 3 scenes"
        );
    }
}
