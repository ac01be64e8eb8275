//! The CUDA driver, the embedded PTX, and digests on a device.

mod digest;
pub(crate) mod driver;
pub(crate) mod error;
mod functions;
pub(crate) mod memory;
pub(crate) mod ptx;
pub(crate) mod table;

pub use digest::{DeviceDigests, DeviceTensor};
pub use error::CudaError;

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::error::{Failure, Status};
use driver::Driver;

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Failure {
        let status = match &error {
            CudaError::NoDriver
            | CudaError::OldDriver { .. }
            | CudaError::NoFunction { .. }
            | CudaError::OldDevice { .. }
            | CudaError::SmallDevice { .. }
            | CudaError::Module { .. } => Status::Unsupported,
            CudaError::Call {
                out_of_memory: true,
                ..
            } => Status::OutOfMemory,
            CudaError::WrongContext { .. } => Status::InvalidArgument,
            _ => Status::Error,
        };
        Failure {
            status,
            message: error.to_string(),
        }
    }
}

/// What has been loaded, by the number of the context.
pub(crate) type Loaded<T> = Mutex<HashMap<u64, &'static T>>;

/// Loads once for the context, which is current.
pub(crate) fn once<T>(
    loaded: &Loaded<T>,
    driver: Driver,
    context: u64,
    load: impl FnOnce() -> Result<T, CudaError>,
) -> Result<&'static T, CudaError> {
    driver.check_context(context)?;
    let id = driver.context_id(context)?;
    // A thread that panicked here left the map as it was.
    let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = loaded.get(&id) {
        return Ok(found);
    }
    let made: &'static T = Box::leak(Box::new(load()?));
    loaded.insert(id, made);
    Ok(made)
}
