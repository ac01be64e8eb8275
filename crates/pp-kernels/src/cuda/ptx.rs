//! The embedded PTX of `kernels/*.cu`: which there is, which of it a device runs, and its digest.

use std::sync::OnceLock;

use super::driver::PtxText;
use super::error::CudaError;
use crate::denoise::settings;

/// The modules with the PTX for compute_80 and for compute_90a, from the files of those names.
macro_rules! modules {
    ($($module:ident = $file:literal),* $(,)?) => {
        #[derive(Debug, Clone, Copy)]
        pub(crate) enum Source { $($module),* }

        impl Source {
            #[cfg(test)]
            const ALL: &[Source] = &[$(Source::$module),*];

            pub(crate) fn ptx(self, arch: Arch) -> PtxText {
                let [old, new] = match self {
                    $(Source::$module => [
                        include_str!(concat!("../../kernels/ptx/", $file, ".compute_80.ptx")),
                        include_str!(concat!("../../kernels/ptx/", $file, ".compute_90a.ptx")),
                    ]),*
                };
                match arch {
                    Arch::Compute80 => PtxText { arch: "compute_80", text: old },
                    Arch::Compute90a => PtxText { arch: "compute_90a", text: new },
                }
            }
        }
    };
}

modules! {
    Encode = "encode",
    Decode = "decode",
    Noise = "noise",
    Unfold = "unfold",
    Attend = "attend",
    Spin = "spin",
    Hbm = "hbm",
    Digest = "digest",
}

/// What the denoiser's results come from.
const DENOISER: [Source; 5] = [
    Source::Encode,
    Source::Decode,
    Source::Noise,
    Source::Unfold,
    Source::Attend,
];

/// The architectures with PTX of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arch {
    Compute80,
    Compute90a,
}

impl Arch {
    /// `compute_90a` runs on 9.0 alone; `compute_80` on everything from 8.0 on.
    pub(crate) fn of((major, minor): (i32, i32)) -> Result<Arch, CudaError> {
        match (major, minor) {
            (9, 0) => Ok(Arch::Compute90a),
            (8.., _) => Ok(Arch::Compute80),
            _ => Err(CudaError::OldDevice { major, minor }),
        }
    }
}

/// Changes with any PTX of the denoiser and with the numbers of the formula, whatever the device: both ranks have the
/// same one.
pub(crate) fn digest() -> u64 {
    static DIGEST: OnceLock<u64> = OnceLock::new();
    *DIGEST.get_or_init(|| {
        let texts = DENOISER
            .iter()
            .flat_map(|source| [Arch::Compute80, Arch::Compute90a].map(|arch| source.ptx(arch)))
            .flat_map(|ptx| ptx.text.as_bytes());
        fnv1a(texts.chain(&settings::DIGEST.to_le_bytes()))
    })
}

/// Source: G. Fowler, L. C. Noll, K.-P. Vo, "The FNV Non-Cryptographic Hash Algorithm"; its 64-bit variant 1a.
fn fnv1a<'a>(bytes: impl Iterator<Item = &'a u8>) -> u64 {
    bytes.fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_gets_the_ptx_that_runs_on_it() {
        assert_eq!(Arch::of((9, 0)), Ok(Arch::Compute90a));
        for newer in [(8, 0), (8, 6), (8, 9), (9, 1), (10, 0), (12, 1)] {
            assert_eq!(Arch::of(newer), Ok(Arch::Compute80), "{newer:?}");
        }
        for older in [(7, 5), (7, 0), (6, 1)] {
            let error = Arch::of(older).unwrap_err().to_string();
            assert!(error.contains("need 8.0 or newer"), "{error}");
        }
    }

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(fnv1a(b"".iter()), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv1a(b"foobar".iter()), 0x8594_4171_F739_67E8);
    }

    #[test]
    fn every_file_holds_ptx_for_what_its_name_says() {
        for source in Source::ALL {
            for (arch, target) in [
                (Arch::Compute80, ".target sm_80\n"),
                (Arch::Compute90a, ".target sm_90a\n"),
            ] {
                assert!(
                    source.ptx(arch).text.contains(target),
                    "{source:?} {arch:?}"
                );
            }
        }
    }

    #[test]
    fn every_kernel_is_in_its_file_with_its_parameters() {
        // Bytes of each parameter, as PTX declares them.
        let kernels: [(Source, &str, &[usize]); 18] = [
            (Source::Encode, "encode", &[8, 8, 8, 80, 4]),
            (Source::Decode, "decode", &[8, 8, 8, 80, 4]),
            (Source::Noise, "noise_count", &[8, 80, 8]),
            (Source::Noise, "noise_sigma", &[8, 8]),
            (Source::Noise, "conditioning", &[8, 4, 8, 8, 4, 8, 8]),
            (Source::Noise, "condition", &[8, 4, 8]),
            (Source::Unfold, "unfold", &[8, 8, 80, 4, 4]),
            (Source::Unfold, "unfold_guides", &[8, 8, 80, 4, 4]),
            (Source::Attend, "attend_first_1", &[160]),
            (Source::Attend, "attend_first_2", &[160]),
            (Source::Attend, "attend_first_4", &[160]),
            (Source::Attend, "attend_next_1", &[160]),
            (Source::Attend, "attend_next_2", &[160]),
            (Source::Attend, "attend_next_4", &[160]),
            (Source::Spin, "spin", &[8]),
            (Source::Hbm, "hbm_copy", &[8, 8, 8, 4]),
            (Source::Digest, "digest_blocks", &[400, 8]),
            (Source::Digest, "digest_tree", &[400, 8, 8, 8]),
        ];
        for (source, name, expected) in kernels {
            for arch in [Arch::Compute80, Arch::Compute90a] {
                let text = source.ptx(arch).text;
                let entry = text.split_once(&format!(".entry {name}("));
                let (_, rest) = entry.unwrap_or_else(|| panic!("{name} is not in {source:?}"));
                let list = rest.split_once(')').expect("the list ends").0;
                let found: Vec<usize> = list.split(',').map(parameter_bytes).collect();
                assert_eq!(found, expected, "{name} {arch:?}");
            }
        }
    }

    /// `.param .u64 name`, or `.param .align 8 .b8 name[160]`.
    fn parameter_bytes(declaration: &str) -> usize {
        if let Some((_, length)) = declaration.split_once('[') {
            let length = length.split_once(']').expect("a length").0;
            return length.parse().expect("a number");
        }
        let bits = declaration
            .split_whitespace()
            .find_map(|word| word.strip_prefix(".u").or_else(|| word.strip_prefix(".b")));
        bits.and_then(|bits| bits.parse::<usize>().ok())
            .expect("a type")
            / 8
    }
}
