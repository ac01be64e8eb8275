//! The PTX kernels through another CUDA library: encode, `phase_b` and decode as the built-in `ptx` kernels compute them,
//! from the same device code in the same order, but every call of the driver is made here, with `cust` where those use
//! `cudarc`.
//!
//! It shows what a CUDA plugin is: a library of its own, which gets a context and a stream through the C interface as two
//! numbers. It needs no toolkit to be built ([`build.rs`] says how), and asks for `libcuda.so.1` when it is loaded.
//!
//! [`build.rs`]: https://doc.rust-lang.org/cargo/reference/build-scripts.html

mod driver;
mod gpu;

pub use gpu::{Function, Memory, Stream};

use pp_kernels::denoise::cuda::{Gpu as _, PtxSession};
use pp_kernels::export::no_args;
use pp_kernels::{Description, Failure, KernelSet, SessionConfig, Space, StageInfo};

/// The kernels of this plugin.
#[derive(Debug)]
pub enum Cust {}

pp_kernels::export_kernels!(Cust);

impl pp_kernels::Kernels for Cust {
    type Session = PtxSession<Stream>;

    fn describe() -> Description {
        Description {
            name: "cust".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            // The same device code gives the same results.
            ..KernelSet::for_device().describe().clone()
        }
    }

    fn create(
        stage: &StageInfo,
        config: &SessionConfig,
        args: &[(&str, &str)],
    ) -> Result<PtxSession<Stream>, Failure> {
        no_args(args)?;
        match config.space {
            Space::Cuda { context, stream } => {
                // SAFETY: the caller of the C table promises both handles for the life of the session.
                let stream = unsafe { Stream::borrow(context, stream) };
                stream.check_current()?;
                // SAFETY: the session is reached through the C table, whose callers promise the contract of a call.
                unsafe { PtxSession::new(stream, stage.kind, config) }
            }
            Space::Host => Err(Failure::unsupported("cust works in CUDA memory only")),
        }
    }
}
