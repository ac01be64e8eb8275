//! The PTX kernels through another CUDA library: encode, Phase B and decode as the built-in `ptx` kernels compute them,
//! from the same device code, launched with `cust` where those use `cudarc`.
//!
//! It shows what a CUDA plugin is: nothing of the host's CUDA code is shared with it but a context and a stream, which
//! come through the C interface as two numbers. The library needs no toolkit to be built ([`build.rs`] says how), and
//! asks for `libcuda.so.1` when it is loaded.
//!
//! [`build.rs`]: https://doc.rust-lang.org/cargo/reference/build-scripts.html

mod driver;
mod gpu;
mod kernels;
mod session;

pub use session::CustSession;

use pp_kernels::denoise::settings::CONTEXT_FRAMES;
use pp_kernels::{Chroma, Description, Failure, KernelSet, SessionConfig, Space};

/// The kernels of this plugin.
#[derive(Debug)]
pub enum Cust {}

pp_kernels::export_kernels!(Cust);

impl pp_kernels::Kernels for Cust {
    type Session = CustSession;

    fn describe() -> Description {
        Description {
            name: "cust".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            host: false,
            cuda: true,
            chroma: Chroma::ALL.into(),
            context_frames: CONTEXT_FRAMES as u32,
            // The same device code gives the same results.
            digest: KernelSet::ptx().describe().digest,
        }
    }

    fn create(config: &SessionConfig) -> Result<CustSession, Failure> {
        match config.space {
            Space::Cuda { context, stream } => CustSession::new(config, context, stream),
            Space::Host => Err(Failure::unsupported("cust works in CUDA memory only")),
        }
    }
}
