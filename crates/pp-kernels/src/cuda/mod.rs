//! The built-in kernels on CUDA devices.

pub(crate) mod driver;
mod frames;
pub(crate) mod kernels;

pub use driver::CudaError;

use crate::config::{Chroma, Description, SessionConfig};
use crate::cpu::settings::CONTEXT_FRAMES;
use crate::error::{Failure, Status};
use crate::export::Kernels;

/// The built-in CUDA kernels.
#[derive(Debug)]
pub(crate) enum Ptx {}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Failure {
        let status = match &error {
            CudaError::NoDriver | CudaError::OldDevice { .. } | CudaError::Module { .. } => {
                Status::Unsupported
            }
            CudaError::Call {
                out_of_memory: true,
                ..
            } => Status::OutOfMemory,
            _ => Status::Error,
        };
        Failure {
            status,
            message: error.to_string(),
        }
    }
}

impl Kernels for Ptx {
    type Session = crate::cpu::CpuSession;

    fn describe() -> Description {
        Description {
            name: "ptx".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            host: false,
            cuda: true,
            chroma: Chroma::ALL.into(),
            context_frames: CONTEXT_FRAMES as u32,
            digest: 2,
        }
    }

    fn create(_: &SessionConfig) -> Result<Self::Session, Failure> {
        driver::Driver::load()?;
        Err(Failure::unsupported("not yet"))
    }
}
