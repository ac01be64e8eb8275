//! PyTorch's library: where it is, and the functions of its C interface that a package is run with.
//!
//! The library is opened once, with `RTLD_GLOBAL`, because the code of a package looks its functions up there, and never closed.

use std::cell::Cell;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fs;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use pp_kernels::{DType, Failure};

/// A tensor of PyTorch.
pub(crate) type Handle = *mut c_void;
/// What the functions of PyTorch return: 0, or an exception was caught, whose words went to standard error.
pub(crate) type Code = c_int;

type Blob = unsafe extern "C" fn(
    *mut c_void,
    i64,
    *const i64,
    *const i64,
    i64,
    i32,
    i32,
    i32,
    *mut Handle,
) -> Code;
type Empty = unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> Code;
type Guard = unsafe extern "C" fn(*mut c_void, i32, *mut *mut c_void) -> Code;
type Number = unsafe extern "C" fn() -> i32;

/// Where the tensors of a session lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    /// The number of the device in this process.
    Cuda(u32),
}

/// The functions, as shim.h of PyTorch declares them.
pub(crate) struct Torch {
    library: ManuallyDrop<Library>,
    /// Where it was found.
    pub(crate) path: PathBuf,
    /// Major, minor and patch.
    pub(crate) version: [u8; 3],
    blob: Blob,
    empty: Empty,
    copy: unsafe extern "C" fn(Handle, Handle, i32) -> Code,
    data: unsafe extern "C" fn(Handle, *mut *mut c_void) -> Code,
    alias: unsafe extern "C" fn(Handle, *mut Handle) -> Code,
    delete: unsafe extern "C" fn(Handle) -> Code,
    /// `at::set_num_threads`, which has no C form.
    threads: Option<unsafe extern "C" fn(c_int)>,
}

const GUARD: &[u8] = b"aoti_torch_create_cuda_stream_guard";

static OPENED: Mutex<Option<&'static Torch>> = Mutex::new(None);

thread_local! {
    /// The number of threads that PyTorch was given for calls of this thread.
    static THREADS: Cell<u32> = const { Cell::new(0) };
}

impl Torch {
    /// The library of this process, which is looked for once.
    ///
    /// # Errors
    /// It is nowhere, or too old.
    pub(crate) fn get() -> Result<&'static Torch, Failure> {
        // A thread that panicked here left what it found or nothing.
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(torch) = *opened {
            return Ok(torch);
        }
        Ok(opened.insert(Box::leak(Box::new(Self::open(&find()?)?))))
    }

    fn open(folder: &Path) -> Result<Torch, Failure> {
        let path = folder.join("libtorch.so");
        let refused = |error: &dyn std::error::Error| {
            let words = error
                .source()
                .map_or_else(|| error.to_string(), ToString::to_string);
            Failure::error(format!(
                "{} cannot be used: {words}; {REMEDY}",
                path.display()
            ))
        };
        // SAFETY: running the library's constructors is what loading means; the user named it, or the environment of Python.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
        let library = ManuallyDrop::new(library.map_err(|error| refused(&error))?);
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: shim.h declares the function of this name with the type of the field that it is put into, and PyTorch
                // keeps these declarations.
                *unsafe { library.get($name) }.map_err(|error| refused(&error))?
            };
        }
        let version: unsafe extern "C" fn() -> u64 = function!(b"aoti_torch_abi_version");
        // SAFETY: takes nothing, gives a constant.
        let [major, minor, patch, ..] = unsafe { version() }.to_be_bytes();
        Ok(Torch {
            version: [major, minor, patch],
            blob: function!(b"aoti_torch_create_tensor_from_blob"),
            empty: function!(b"aoti_torch_empty_strided"),
            copy: function!(b"aoti_torch_copy_"),
            data: function!(b"aoti_torch_get_data_ptr"),
            alias: function!(b"aoti_torch_new_tensor_handle"),
            delete: function!(b"aoti_torch_delete_tensor_object"),
            // SAFETY: `void at::set_num_threads(int)`.
            threads: unsafe { library.get(b"_ZN2at15set_num_threadsEi") }
                .ok()
                .map(|found| *found),
            library,
            path,
        })
    }

    /// PyTorch's number of a type or a device, which a function of the library gives.
    fn number(&self, name: &str) -> Result<i32, Failure> {
        // SAFETY: each function whose name is made here takes nothing and gives an `int32_t` (shim.h).
        let function = unsafe { self.library.get::<Number>(name.as_bytes()) };
        let function = function.map_err(|_| {
            Failure::error(format!("{} lacks {name}; {REMEDY}", self.path.display()))
        })?;
        // SAFETY: as above.
        Ok(unsafe { function() })
    }

    fn dtype(&self, dtype: DType) -> Result<i32, Failure> {
        let name = match dtype {
            DType::U8 => "uint8",
            DType::I8 => "int8",
            DType::Bool => "bool",
            DType::I16 => "int16",
            DType::U16 => "uint16",
            DType::I32 => "int32",
            DType::U32 => "uint32",
            DType::I64 => "int64",
            DType::F16 => "float16",
            DType::Bf16 => "bfloat16",
            DType::F32 => "float32",
            DType::F64 => "float64",
            DType::F8E4m3fn => "float8_e4m3fn",
            DType::F8E5m2 => "float8_e5m2",
        };
        self.number(&format!("aoti_torch_dtype_{name}"))
    }

    /// Type and number of a device.
    fn device(&self, place: Place) -> Result<(i32, i32), Failure> {
        match place {
            Place::Host => Ok((self.number("aoti_torch_device_type_cpu")?, 0)),
            Place::Cuda(number) => Ok((self.number("aoti_torch_device_type_cuda")?, number as i32)),
        }
    }

    /// A tensor over memory at an address, row-major.
    ///
    /// # Safety
    /// The memory lies in `place`, holds such a tensor, and is used by no call after it was freed.
    pub(crate) unsafe fn over(
        &'static self,
        address: u64,
        (dtype, dims): (DType, &[u64]),
        place: Place,
    ) -> Result<Tensor, Failure> {
        let ([sizes, strides], (kind, index)) = (row_major(dims), self.device(place)?);
        let (address, mut made) = (
            ptr::with_exposed_provenance_mut(address as usize),
            ptr::null_mut(),
        );
        // SAFETY: the arrays have as many elements as there are dimensions, and are copied; the memory is the caller's duty.
        let code = unsafe {
            let count = sizes.len() as i64;
            (self.blob)(
                address,
                count,
                sizes.as_ptr(),
                strides.as_ptr(),
                0,
                self.dtype(dtype)?,
                kind,
                index,
                &raw mut made,
            )
        };
        self.tensor(code, "make a tensor", made)
    }

    /// A tensor with memory of its own.
    ///
    /// # Errors
    /// There is no memory left.
    pub(crate) fn empty(
        &'static self,
        (dtype, dims): (DType, &[u64]),
        place: Place,
    ) -> Result<Tensor, Failure> {
        let ([sizes, strides], (kind, index)) = (row_major(dims), self.device(place)?);
        let mut made = ptr::null_mut();
        // SAFETY: the arrays have as many elements as there are dimensions, and are copied.
        let code = unsafe {
            let count = sizes.len() as i64;
            (self.empty)(
                count,
                sizes.as_ptr(),
                strides.as_ptr(),
                self.dtype(dtype)?,
                kind,
                index,
                &raw mut made,
            )
        };
        self.tensor(code, "allocate", made)
    }

    fn tensor(&'static self, code: Code, what: &str, handle: Handle) -> Result<Tensor, Failure> {
        judge(code, what)?;
        Ok(Tensor {
            torch: self,
            handle,
        })
    }

    /// Gives calls of this thread so many threads; 0: as many as the library likes.
    pub(crate) fn use_threads(&self, threads: u32) {
        if let Some(set) = self
            .threads
            .filter(|_| threads > 0 && THREADS.replace(threads) != threads)
        {
            // SAFETY: `at::set_num_threads` takes a positive number.
            unsafe { set(threads as c_int) }
        }
    }

    /// Says whether it works on GPUs.
    pub(crate) fn has_cuda(&self) -> bool {
        // SAFETY: the symbol is looked for, and not called.
        unsafe { self.library.get::<Guard>(GUARD) }.is_ok()
    }

    /// Makes a stream the one that PyTorch's own work of this thread goes to, for as long as the result lives.
    ///
    /// # Safety
    /// `stream` is a live `CUstream` of the device of this number.
    pub(crate) unsafe fn on_stream(&self, stream: u64, device: u32) -> Result<OnStream, Failure> {
        let missing = |error: libloading::Error| Failure::error(error.to_string());
        // SAFETY: shim.h declares both.
        let (make, delete) = unsafe {
            let delete = self.library.get(b"aoti_torch_delete_cuda_stream_guard");
            (
                *self.library.get::<Guard>(GUARD).map_err(missing)?,
                *delete.map_err(missing)?,
            )
        };
        let mut guard = ptr::null_mut();
        let stream = ptr::with_exposed_provenance_mut(stream as usize);
        // SAFETY: the stream is the caller's duty; writes one pointer to a local.
        let code = unsafe { make(stream, device as i32, &raw mut guard) };
        judge(code, "set the stream")?;
        Ok(OnStream { guard, delete })
    }
}

/// Until it is dropped, PyTorch's work of this thread goes to a stream.
pub(crate) struct OnStream {
    guard: *mut c_void,
    delete: unsafe extern "C" fn(*mut c_void) -> Code,
}

impl Drop for OnStream {
    fn drop(&mut self) {
        // SAFETY: the guard was made once and is deleted once, on the thread that made it: it is not `Send`.
        unsafe { (self.delete)(self.guard) };
    }
}

/// A tensor that this plugin holds.
pub(crate) struct Tensor {
    torch: &'static Torch,
    handle: Handle,
}

// SAFETY: a counted pointer to a tensor, whose count is atomic; calls on it never overlap.
unsafe impl Send for Tensor {}

impl Tensor {
    /// One more handle of the tensor, for a function that takes it over.
    pub(crate) fn alias(&self) -> Result<Handle, Failure> {
        let mut made = ptr::null_mut();
        // SAFETY: the tensor lives; writes one pointer to a local.
        let code = unsafe { (self.torch.alias)(self.handle, &raw mut made) };
        judge(code, "share a tensor")?;
        Ok(made)
    }

    pub(crate) fn address(&self) -> Result<u64, Failure> {
        let mut address: *mut c_void = ptr::null_mut();
        // SAFETY: the tensor lives; writes one pointer to a local.
        let code = unsafe { (self.torch.data)(self.handle, &raw mut address) };
        judge(code, "look at a tensor")?;
        Ok(address.expose_provenance() as u64)
    }

    /// Copies another one of the same shape into this one; from or to a device in the order of its current stream, and to the
    /// host it waits.
    pub(crate) fn fill(&self, from: &Tensor) -> Result<(), Failure> {
        // SAFETY: both tensors live.
        judge(
            unsafe { (self.torch.copy)(self.handle, from.handle, 0) },
            "copy a tensor",
        )
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the handle was made once and is deleted once.
        unsafe { (self.torch.delete)(self.handle) };
    }
}

/// Sizes and strides.
fn row_major(dims: &[u64]) -> [Vec<i64>; 2] {
    let sizes: Vec<i64> = dims.iter().map(|size| *size as i64).collect();
    let mut strides = vec![1; dims.len()];
    for at in (1..dims.len()).rev() {
        strides[at - 1] = strides[at] * sizes[at].max(1);
    }
    [sizes, strides]
}

pub(crate) fn judge(code: Code, what: &str) -> Result<(), Failure> {
    match code {
        0 => Ok(()),
        _ => Err(Failure::error(format!(
            "PyTorch cannot {what}; its words are on standard error"
        ))),
    }
}

const REMEDY: &str =
    "PP_LIBTORCH names the folder of another libtorch.so, of PyTorch 2.10 or newer";
/// Prints where PyTorch is, without importing it.
const WHERE: &str = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')";

/// The folder of `libtorch.so`.
fn find() -> Result<PathBuf, Failure> {
    let is_there = |folder: &PathBuf| folder.join("libtorch.so").is_file();
    if let Some(named) = std::env::var_os("PP_LIBTORCH").filter(|named| !named.is_empty()) {
        let folders = [PathBuf::from(&named), Path::new(&named).join("lib")];
        return folders.into_iter().find(is_there).ok_or_else(|| {
            let named = named.display();
            Failure::error(format!(
                "PP_LIBTORCH={named}: there is no libtorch.so; name the folder that holds it"
            ))
        });
    }
    let of_environment =
        std::env::var_os("VIRTUAL_ENV").map(|at| Path::new(&at).join("bin/python3"));
    let mut tried = Vec::new();
    for python in of_environment.into_iter().chain([PathBuf::from("python3")]) {
        let asked = Command::new(&python)
            .args([OsStr::new("-c"), OsStr::new(WHERE)])
            .output();
        let said = asked.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        let folder = said
            .map(|said| PathBuf::from(said).join("lib"))
            .unwrap_or_default();
        // The loader wants a path, and not a link of a virtual environment.
        if let Some(folder) = Some(folder)
            .filter(is_there)
            .and_then(|folder| fs::canonicalize(folder).ok())
        {
            return Ok(folder);
        }
        tried.push(python.display().to_string());
    }
    Err(Failure::error(format!(
        "no PyTorch was found: {} cannot import torch; activate an environment that has it, or set PP_LIBTORCH to the folder of \
         libtorch.so",
        tried.join(" and ")
    )))
}

/// The words of a function that gives a text, if there are any.
///
/// # Safety
/// `text` is null or ends with a NUL.
pub(crate) unsafe fn words(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's duty.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    Some(text.trim().replace('\n', " "))
}
