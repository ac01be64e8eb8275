//! Why something on a device did not work, with the remedy.

use std::time::Duration;

/// Why the driver did not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "libcuda.so.1 was not found; install the NVIDIA driver, 580 or newer, or run on the CPU with --kernels cpu"
    )]
    NoDriver,
    /// The driver is older than the PTX.
    #[error(
        "the NVIDIA driver is for CUDA {found}, and the built-in PTX needs {needed}; update the driver to 580 or newer, \
         or run on the CPU with --kernels cpu"
    )]
    OldDriver {
        /// What it says of itself.
        found: String,
        /// What is needed.
        needed: String,
    },
    /// The driver lacks a function, though it says that it is new enough.
    #[error(
        "libcuda has no {function}: install the NVIDIA driver again (580 or newer), or run on the CPU with \
         --kernels cpu"
    )]
    NoFunction {
        /// Which one.
        function: &'static str,
    },
    /// The context of the call is not the one the work belongs to.
    #[error(
        "the CUDA context {wanted:#x} must be current on the calling thread, it is {found:#x}; bind the device first"
    )]
    WrongContext {
        /// The context of the session.
        wanted: u64,
        /// The context found, 0 for none.
        found: u64,
    },
    /// The device is too old for the kernels.
    #[error(
        "the GPU has compute capability {major}.{minor}, these kernels need 8.0 or newer; run on the CPU with \
         --kernels cpu"
    )]
    OldDevice {
        /// Its major version.
        major: i32,
        /// Its minor version.
        minor: i32,
    },
    /// The device has too little shared memory for the kernels.
    #[error(
        "a block on the GPU has at most {there_is} bytes of shared memory, these kernels need {needed} (A100, H100 and \
         H200 have them); run on the CPU with --kernels cpu"
    )]
    SmallDevice {
        /// What a block may have.
        there_is: u32,
        /// What it must have.
        needed: u32,
    },
    /// The driver does not take the PTX.
    #[error("the driver refuses the PTX ({name}): {log}{remedy}")]
    Module {
        /// The driver's code.
        name: String,
        /// What its compiler said.
        log: String,
        /// What to do about it, where that is known.
        remedy: &'static str,
    },
    /// A library other than the driver is missing.
    #[error("{library} is not found: {remedy}")]
    NoLibrary {
        /// Which one.
        library: &'static str,
        /// Where it was looked for, and how to say where it is.
        remedy: String,
    },
    /// A call of a library other than the driver failed.
    #[error("{function} failed: {status}")]
    Library {
        /// The function.
        function: &'static str,
        /// Its status.
        status: String,
    },
    /// A number that was asked for is out of its range.
    #[error("{0}")]
    Argument(String),
    /// A wait that has a limit came to it.
    #[error("the stream is not done after {0:?}")]
    Late(Duration),
    /// A call of the driver failed, or work before it did.
    #[error("{function} failed: {name} ({text})")]
    Call {
        /// The function.
        function: &'static str,
        /// The name of the code.
        name: String,
        /// The driver's words.
        text: String,
        /// Whether it is for want of memory.
        out_of_memory: bool,
    },
}
