//! Which library it is: its version, and who named it.

use std::fmt;

/// The environment variable that names the library. When it is set, nothing else is tried.
pub const LIBRARY_VARIABLE: &str = "PP_NCCL_LIB";

/// The oldest version that is accepted. Before 2.17 a library does not know settings that were left open
/// ([`crate::UNDEFINED_INT`]) and would take them at their word; 2.18 is the oldest one that anybody still installs for
/// CUDA 12 and newer, which is what the GPUs in question need.
pub const MINIMUM: Version = Version {
    major: 2,
    minor: 18,
    patch: 0,
};

/// A version of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The interface.
    pub major: u32,
    /// Grows with every release.
    pub minor: u32,
    /// Grows with every correction.
    pub patch: u32,
}

impl Version {
    /// From what `ncclGetVersion` says: `22809` is 2.28.9, and `2708`, from before 2.9, is 2.7.8.
    #[must_use]
    pub fn from_code(code: u32) -> Version {
        let major = if code < 10_000 { 1_000 } else { 10_000 };
        Version {
            major: code / major,
            minor: code % major / 100,
            patch: code % 100,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Who named the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The environment variable [`LIBRARY_VARIABLE`].
    Variable,
    /// The dynamic linker: `LD_LIBRARY_PATH`, the run path of the program, the directories of the system.
    Linker,
    /// The package `nvidia-nccl-cu*` of the `python3` on `PATH`.
    Python,
    /// The caller of [`crate::Nccl::open`].
    Caller,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Variable => LIBRARY_VARIABLE,
            Origin::Linker => "the dynamic linker",
            Origin::Python => "the Python on PATH",
            Origin::Caller => "the caller",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_codes_of_both_schemes() {
        assert_eq!(Version::from_code(22_809).to_string(), "2.28.9");
        assert_eq!(Version::from_code(21_805).to_string(), "2.18.5");
        assert_eq!(Version::from_code(2_708).to_string(), "2.7.8");
        assert_eq!(Version::from_code(30_000).to_string(), "3.0.0");
        assert!(Version::from_code(21_703) < MINIMUM && Version::from_code(21_801) >= MINIMUM);
    }
}
