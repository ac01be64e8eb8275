//! Where cublasLt is found: the path in `PP_CUBLASLT_LIB`, the dynamic linker, the wheel of the Python on PATH.
//!
//! Hazard: cudarc panics when the library is missing. So it is found, opened and kept here first; the linker then
//! gives cudarc the same library for its name.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use cudarc::cublaslt::sys;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::cuda::CudaError;

/// The variable that says where the library is.
const VARIABLE: &str = "PP_CUBLASLT_LIB";
/// The name by which cudarc finds what is already open.
const FILE: &str = "libcublasLt.so.13";

/// Proof that cublasLt is there.
#[derive(Debug, Clone, Copy)]
pub(super) struct CublasLt(());

impl CublasLt {
    /// Finds the library. It stays open for the life of the process.
    pub(super) fn load() -> Result<CublasLt, CudaError> {
        static LOADED: OnceLock<CublasLt> = OnceLock::new();
        if let Some(found) = LOADED.get() {
            return Ok(*found);
        }
        let found = match std::env::var_os(VARIABLE) {
            Some(path) => open(Path::new(&path)).and_then(|()| {
                is_present().then_some(()).ok_or_else(|| {
                    format!("its soname is not {FILE}, so it is not cublasLt of CUDA 13")
                })
            }),
            None if is_present() => Ok(()),
            None => from_wheels(),
        };
        let missing = |why: String| CudaError::NoLibrary {
            library: FILE,
            remedy: format!(
                "{why}; set {VARIABLE} to its path, or install the wheel nvidia-cublas of CUDA 13 for the python3 on \
                 PATH"
            ),
        };
        found.map_err(missing)?;
        Ok(*LOADED.get_or_init(|| CublasLt(())))
    }
}

fn is_present() -> bool {
    // SAFETY: loading the library runs its constructors, which is what loading it means.
    unsafe { sys::is_culib_present() }
}

/// Opens a file for good.
fn open(path: &Path) -> Result<(), String> {
    // SAFETY: as above.
    match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            std::mem::forget(library);
            Ok(())
        }
        Err(error) => {
            // The cause is the linker's own text, which begins with the path.
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            Err(cause.unwrap_or_else(|| format!("{}: {error}", path.display())))
        }
    }
}

/// Opens the library of a wheel that the Python on PATH has.
fn from_wheels() -> Result<(), String> {
    let mut why = String::from("neither the dynamic linker nor a wheel has it");
    for path in in_wheels(&said_by(&mut Command::new("python3"))) {
        match open(&path) {
            Ok(()) if is_present() => return Ok(()),
            Ok(()) => why = format!("{}: it has another soname", path.display()),
            Err(reason) => why = reason,
        }
    }
    Err(why)
}

/// The directories, one on each line, in which a Python finds NVIDIA's wheels; nothing where there are none.
fn said_by(python: &mut Command) -> String {
    let script = "import nvidia\nfor path in nvidia.__path__: print(path)";
    let output = python
        .args(["-c", script])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    output.map_or_else(
        |_| String::new(),
        |output| String::from_utf8_lossy(&output.stdout).into_owned(),
    )
}

/// The places where wheels of CUDA 13 put it, as far as it is there.
fn in_wheels(roots: &str) -> Vec<PathBuf> {
    roots
        .lines()
        .flat_map(|root| ["cu13", "cublas"].map(|part| Path::new(root).join(part)))
        .map(|directory| directory.join("lib").join(FILE))
        .filter(|path| path.is_file())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_for_where_the_wheels_of_cuda_13_put_it() {
        let root = std::env::temp_dir().join(format!("pp-wheels-{}", std::process::id()));
        let directory = root.join("nvidia/cu13/lib");
        std::fs::create_dir_all(&directory).unwrap();
        let nvidia = root.join("nvidia");
        let mut python = Command::new("python3");
        let mut roots = format!("/nowhere\n{}", said_by(python.env("PYTHONPATH", &root)));
        if python.output().is_err() {
            // A machine without Python has no wheels, and nothing to ask.
            roots += &format!("{}\n", nvidia.display());
        }
        let before = in_wheels(&roots);
        std::fs::write(directory.join(FILE), "not a library").unwrap();
        let found = in_wheels(&roots);
        let refused = open(&directory.join(FILE));
        std::fs::remove_dir_all(&root).unwrap();
        let is_listed = roots.lines().any(|line| Path::new(line) == nvidia);
        assert!(is_listed, "python3 said {roots:?}");
        assert!(before.is_empty(), "{before:?}");
        assert_eq!(found, [directory.join(FILE)]);
        let reason = refused.unwrap_err();
        assert!(
            reason.contains("cu13/lib/libcublasLt.so.13: ") && reason.len() > 60,
            "{reason}"
        );
    }
}
