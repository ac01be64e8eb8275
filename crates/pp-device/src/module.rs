//! Modules of PTX, and launches of their functions.

use std::ffi::{CString, c_int, c_void};
use std::ptr;

use cudarc::driver::sys::{CUfunction_attribute, CUjit_option as Jit};

use crate::device::Device;
use crate::driver::{Driver, Handle, call};
use crate::error::{CudaError, UNSUPPORTED_PTX};
use crate::stream::Stream;

/// A module, loaded into the context of a device. Never unloaded: unloading waits for the device,
/// and the context takes it along.
#[derive(Debug)]
pub struct Module {
    handle: usize,
}

impl Module {
    /// Compiles PTX for the device.
    ///
    /// # Errors
    /// [`CudaError::Module`], with what the driver's compiler said.
    pub fn load(device: &Device, ptx: &str) -> Result<Self, CudaError> {
        let text = CString::new(ptx).map_err(|_| CudaError::Module {
            name: "CUDA_ERROR_INVALID_PTX".into(),
            log: "it holds a NUL".into(),
            remedy: "",
        })?;
        device.bind_anew()?;
        let driver = Driver::loaded();
        let mut log = vec![0u8; 4096];
        let mut options = [
            Jit::CU_JIT_ERROR_LOG_BUFFER as c_int,
            Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as c_int,
        ];
        // The driver takes small numbers in the place of pointers.
        let mut values: [*mut c_void; 2] = [
            log.as_mut_ptr().cast(),
            ptr::without_provenance_mut(log.len()),
        ];
        let mut module: Handle = ptr::null_mut();
        // SAFETY: the context is current; text, options and the log buffer live across the call and
        // are as long as said.
        let code = unsafe {
            (driver.cuModuleLoadDataEx)(
                &raw mut module,
                text.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code == 0 {
            let handle = module as usize;
            return Ok(Self { handle });
        }
        let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
        let mut said = String::from_utf8_lossy(&log[..end])
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        let (name, text) = driver.words(code);
        if said.is_empty() {
            said = text;
        }
        Err(CudaError::Module {
            name,
            log: said,
            remedy: if code == UNSUPPORTED_PTX {
                "; update the NVIDIA driver to 580 or newer (CUDA 13.0)"
            } else {
                ""
            },
        })
    }

    /// A function of the module.
    ///
    /// # Errors
    /// It has none of this name.
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        let name = CString::new(name).unwrap_or_default();
        let mut function: Handle = ptr::null_mut();
        // SAFETY: the module is loaded; name and result live across the call.
        unsafe {
            call!(cuModuleGetFunction(
                &raw mut function,
                self.handle as Handle,
                name.as_ptr()
            ))
        }?;
        Ok(Function {
            handle: function as usize,
        })
    }
}

/// A function that a stream can launch.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    handle: usize,
}

impl Function {
    /// Lets launches have so much dynamic shared memory; without it they may have 48 KiB.
    ///
    /// # Errors
    /// The device has less.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module.
        unsafe {
            call!(cuFuncSetAttribute(
                self.handle as Handle,
                attribute as c_int,
                bytes as c_int
            ))
        }
    }

    /// Issues a launch.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// `arguments` point to values of the types of the function's parameters, in their order
    /// ([`arguments!`](crate::arguments)), and what it reads and writes through them stays allocated
    /// until the stream has passed it.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        config: LaunchConfig,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let ([gx, gy, gz], [bx, by, bz]) = (config.grid, config.block);
        // SAFETY: the caller's duty; the arguments are copied before the call returns.
        unsafe {
            call!(cuLaunchKernel(
                self.handle as Handle,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                config.shared,
                stream.handle(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            ))
        }
    }
}

/// Pointers to the arguments of a launch, each a variable of the parameter's type.
#[macro_export]
macro_rules! arguments {
    ($($value:ident),* $(,)?) => { [$((&raw const $value).cast_mut().cast::<::std::ffi::c_void>()),*] };
}

/// Blocks, threads in a block, and bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}

impl LaunchConfig {
    /// Blocks in one dimension.
    #[must_use]
    pub fn line(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared: 0,
        }
    }
}
