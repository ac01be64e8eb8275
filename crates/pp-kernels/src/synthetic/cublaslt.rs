//! cublasLt: where it is found (the path in `PP_CUBLASLT_LIB`, the dynamic linker, the wheel of the Python on PATH), and
//! the functions that are called.

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::cublaslt::sys;
use libloading::Library;
use pp_device::functions;

use crate::error::Failure;

/// The variable that says where the library is.
const VARIABLE: &str = "PP_CUBLASLT_LIB";
/// The name of its file in CUDA 13, and one without a version that an installation may have.
const FILE: &str = "libcublasLt.so.13";
const ANY: &str = "libcublasLt.so";

functions! {
    /// What is called of the library, with the types of cublasLt.h 13.0, which those of older ones are, too.
    Functions {
        cublasLtCreate(*mut sys::cublasLtHandle_t);
        cublasLtDestroy(sys::cublasLtHandle_t);
        cublasLtMatmulDescCreate(
            *mut sys::cublasLtMatmulDesc_t,
            sys::cublasComputeType_t,
            sys::cudaDataType,
        );
        cublasLtMatmulDescDestroy(sys::cublasLtMatmulDesc_t);
        cublasLtMatrixLayoutCreate(
            *mut sys::cublasLtMatrixLayout_t,
            sys::cudaDataType,
            u64,
            u64,
            i64,
        );
        cublasLtMatrixLayoutDestroy(sys::cublasLtMatrixLayout_t);
        cublasLtMatmulPreferenceCreate(*mut sys::cublasLtMatmulPreference_t);
        cublasLtMatmulPreferenceSetAttribute(
            sys::cublasLtMatmulPreference_t,
            sys::cublasLtMatmulPreferenceAttributes_t,
            *const c_void,
            usize,
        );
        cublasLtMatmulPreferenceDestroy(sys::cublasLtMatmulPreference_t);
        cublasLtMatmulAlgoGetHeuristic(
            sys::cublasLtHandle_t,
            sys::cublasLtMatmulDesc_t,
            sys::cublasLtMatrixLayout_t,
            sys::cublasLtMatrixLayout_t,
            sys::cublasLtMatrixLayout_t,
            sys::cublasLtMatrixLayout_t,
            sys::cublasLtMatmulPreference_t,
            c_int,
            *mut Choice,
            *mut c_int,
        );
        cublasLtMatmul(
            sys::cublasLtHandle_t,
            sys::cublasLtMatmulDesc_t,
            *const c_void,
            *const c_void,
            sys::cublasLtMatrixLayout_t,
            *const c_void,
            sys::cublasLtMatrixLayout_t,
            *const c_void,
            *const c_void,
            sys::cublasLtMatrixLayout_t,
            *mut c_void,
            sys::cublasLtMatrixLayout_t,
            *const sys::cublasLtMatmulAlgo_t,
            *mut c_void,
            usize,
            sys::cudaStream_t,
        );
    }
}

/// `cublasLtMatmulHeuristicResult_t`, with the status as the number that it is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub(super) algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
    pub(super) state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = assert!(size_of::<Choice>() == size_of::<sys::cublasLtMatmulHeuristicResult_t>());

impl Choice {
    /// None yet.
    pub(super) const NONE: Choice = Choice {
        algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        workspace: 0,
        state: 0,
        waves: 0.0,
        reserved: [0; 4],
    };
}

/// Proof that cublasLt is there, with its functions.
#[derive(Debug, Clone, Copy)]
pub(super) struct CublasLt(pub(super) &'static Functions);

/// Calls a function of the library; its name goes into the error. The caller's `unsafe` block vouches for the arguments.
macro_rules! call {
    ($library:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let library: $crate::synthetic::cublaslt::CublasLt = $library;
        let code = (library.0.$function)($($argument),*);
        $crate::synthetic::cublaslt::judge(stringify!($function), code)
    }};
}
pub(super) use call;

/// An error unless the code is success; a library that fails counts as one that does not serve the device.
pub(super) fn judge(function: &'static str, code: c_int) -> Result<(), Failure> {
    let name = match code {
        0 => return Ok(()),
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        7 => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        NOT_SUPPORTED => "CUBLAS_STATUS_NOT_SUPPORTED",
        _ => "cublasStatus_t",
    };
    Err(Failure::unsupported(format!(
        "{function} failed: {name} ({code})"
    )))
}

/// The status for which there is no algorithm.
pub(super) const NOT_SUPPORTED: c_int = 15;

impl CublasLt {
    /// Finds the library. It stays open for the life of the process.
    pub(super) fn load() -> Result<CublasLt, Failure> {
        static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
        if let Some(functions) = FUNCTIONS.get() {
            return Ok(CublasLt(functions));
        }
        let found = match std::env::var_os(VARIABLE) {
            Some(path) => open(Path::new(&path)),
            None => open(Path::new(FILE))
                .or_else(|_| open(Path::new(ANY)))
                .or_else(|_| from_wheels()),
        };
        let functions = found.map_err(|why| {
            Failure::unsupported(format!(
                "{FILE} is not found: {why}; set {VARIABLE} to its path, or install the wheel nvidia-cublas of CUDA 13 \
                 for the python3 on PATH"
            ))
        })?;
        Ok(CublasLt(FUNCTIONS.get_or_init(|| functions)))
    }
}

/// Opens a file for good, if it has the functions.
fn open(path: &Path) -> Result<Functions, String> {
    // SAFETY: loading the library runs its constructors, which is what loading it means.
    let library = unsafe { Library::new(path) }.map_err(|error| {
        // The cause is the linker's own text, which begins with the path.
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        cause.unwrap_or_else(|| format!("{}: {error}", path.display()))
    })?;
    // SAFETY: the names are the library's own, and it is never unloaded if it has them.
    let functions = unsafe { Functions::look_up(&library) }
        .map_err(|missing| format!("{}: it has no {missing}", path.display()))?;
    std::mem::forget(library);
    Ok(functions)
}

/// Opens the library of a wheel that the Python on PATH has.
fn from_wheels() -> Result<Functions, String> {
    let mut why = String::from("neither the dynamic linker nor a wheel has it");
    let roots = pp_wheels::wheels().map_err(|reason| format!("{why} ({reason})"))?;
    for path in in_wheels(&roots) {
        match open(&path) {
            Ok(functions) => return Ok(functions),
            Err(reason) => why = reason,
        }
    }
    Err(why)
}

/// The places where wheels of CUDA 13 put it, as far as it is there.
fn in_wheels(roots: &[PathBuf]) -> Vec<PathBuf> {
    roots
        .iter()
        .flat_map(|root| ["cu13", "cublas"].map(|part| root.join(part)))
        .map(|directory| directory.join("lib").join(FILE))
        .filter(|path| path.is_file())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cublaslt_is_found_in_the_wheels_of_cuda_13() {
        let root = std::env::temp_dir().join(format!("pp-wheels-{}", std::process::id()));
        let directory = root.join("nvidia/cu13/lib");
        std::fs::create_dir_all(&directory).unwrap();
        let roots = ["/nowhere".into(), root.join("nvidia")];
        let before = in_wheels(&roots);
        std::fs::write(directory.join(FILE), "not a library").unwrap();
        let found = in_wheels(&roots);
        let refused = open(&directory.join(FILE));
        std::fs::remove_dir_all(&root).unwrap();
        assert!(before.is_empty(), "{before:?}");
        assert_eq!(found, [directory.join(FILE)]);
        let reason = refused.unwrap_err();
        assert!(
            reason.contains("cu13/lib/libcublasLt.so.13: ") && reason.len() > 60,
            "{reason}"
        );
    }

    #[test]
    fn a_library_that_is_another_one_is_refused() {
        let reason = open(Path::new("libc.so.6")).unwrap_err();
        assert_eq!(reason, "libc.so.6: it has no cublasLtCreate");
    }

    #[test]
    fn a_status_that_nobody_knows_is_an_error() {
        let status = |code| judge("cublasLtMatmul", code).unwrap_err().to_string();
        let known = status(NOT_SUPPORTED);
        assert_eq!(
            known,
            "cublasLtMatmul failed: CUBLAS_STATUS_NOT_SUPPORTED (15)"
        );
        assert_eq!(status(4242), "cublasLtMatmul failed: cublasStatus_t (4242)");
        assert!(judge("cublasLtMatmul", 0).is_ok());
    }
}
