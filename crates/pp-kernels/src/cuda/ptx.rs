//! The embedded PTX of `kernels/*.cu`: which there is, and which devices run it.

use pp_device::Device;

use crate::error::Failure;

/// The modules, from the files of those names.
macro_rules! modules {
    ($($module:ident = $file:literal),* $(,)?) => {
        #[derive(Debug, Clone, Copy)]
        pub(crate) enum Source { $($module),* }

        impl Source {
            #[cfg(test)]
            const ALL: &[Source] = &[$(Source::$module),*];

            /// PTX for compute_80, which the driver compiles for every device from 8.0 on.
            pub(crate) fn ptx(self) -> &'static str {
                match self {
                    $(Source::$module => include_str!(concat!("../../kernels/ptx/", $file, ".ptx"))),*
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

/// The oldest driver that takes PTX of this version (9.0), as the driver counts: 13.0.
const NEEDED: u32 = 13_000;

/// Refuses a driver or a device that is too old for the PTX.
pub(crate) fn check_device(device: &Device) -> Result<(), Failure> {
    let about = device.about();
    let capability = [about.compute_major, about.compute_minor];
    check(about.driver_version, capability)
}

/// Refuses a driver version or a compute capability that is too low for the PTX.
pub(crate) fn check(driver: u32, [major, minor]: [u32; 2]) -> Result<(), Failure> {
    if driver < NEEDED {
        let text = |v: u32| format!("{}.{}", v / 1000, v % 1000 / 10);
        let (found, needed) = (text(driver), text(NEEDED));
        return Err(Failure::unsupported(format!(
            "the NVIDIA driver is for CUDA {found}, and the built-in PTX needs {needed}; update the driver to 580 or \
             newer, or run on the CPU with --kernels cpu"
        )));
    }
    if major < 8 {
        return Err(Failure::unsupported(format!(
            "the GPU has compute capability {major}.{minor}, these kernels need 8.0 or newer; run on the CPU with \
             --kernels cpu"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_and_devices_that_are_too_old_are_refused() {
        for device in [[8, 0], [8, 6], [9, 0], [10, 0], [12, 1]] {
            assert_eq!(check(13_000, device), Ok(()), "{device:?}");
        }
        for older in [[7, 5], [7, 0], [6, 1]] {
            let error = check(13_010, older).unwrap_err().to_string();
            assert!(error.contains("need 8.0 or newer"), "{error}");
        }
        let error = check(12_080, [9, 0]).unwrap_err().to_string();
        assert!(
            error.contains("CUDA 12.8") && error.contains("needs 13.0"),
            "{error}"
        );
    }

    #[test]
    fn every_file_holds_ptx_for_the_oldest_device() {
        for source in Source::ALL {
            assert!(source.ptx().contains(".target sm_80\n"), "{source:?}");
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
            let entry = source.ptx().split_once(&format!(".entry {name}("));
            let (_, rest) = entry.unwrap_or_else(|| panic!("{name} is not in {source:?}"));
            let list = rest.split_once(')').expect("the list ends").0;
            let found: Vec<usize> = list.split(',').map(parameter_bytes).collect();
            assert_eq!(found, expected, "{name}");
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
