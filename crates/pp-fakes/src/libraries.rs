//! The compiled libraries: how they are found and loaded.

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};

/// A fake driver and a fake NCCL, as files.
#[derive(Clone, Debug)]
pub struct Fakes {
    directory: PathBuf,
}

/// The fakes inside this process.
#[derive(Debug)]
pub struct Loaded {
    set: Symbol<unsafe extern "C" fn(*const c_char, *const c_char) -> c_int>,
    note: Symbol<unsafe extern "C" fn(*const c_char)>,
    /// Finds the functions of the driver, too.
    nccl: &'static Library,
}

impl Fakes {
    /// The newest NCCL and driver.
    pub fn newest() -> Self {
        Self::compiled("newest")
    }

    /// An older NCCL, which lacks `ncclCommRevoke`.
    pub fn without_revoke() -> Self {
        Self::compiled("without_revoke")
    }

    /// `build.rs` made this folder.
    fn compiled(folder: &str) -> Self {
        let directory = Path::new(env!("OUT_DIR")).join(folder);
        Self { directory }
    }

    /// The folder of the libraries, for `LD_LIBRARY_PATH`.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The fake NCCL, for `PP_NCCL_LIB`.
    pub fn nccl(&self) -> PathBuf {
        self.directory.join("libnccl.so.2")
    }

    /// Lets a child process find the fakes, and nothing else, under the names of the real libraries.
    pub fn give_to<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        let mut path = self.directory.as_os_str().to_owned();
        if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
            path.push(":");
            path.push(others);
        }
        command
            .env("LD_LIBRARY_PATH", path)
            .env("PP_NCCL_LIB", self.nccl())
    }

    /// Loads the fakes into this process, once; must come before the first use of CUDA or NCCL in it.
    ///
    /// # Panics
    ///
    /// If a library cannot be loaded.
    pub fn load(&self) -> &'static Loaded {
        static LOADED: OnceLock<Loaded> = OnceLock::new();
        LOADED.get_or_init(|| {
            // A later load of `libcuda.so`, `libcuda.so.1` or `libnccl.so.2` gets what is loaded already.
            let [_, _, nccl] = ["libcuda.so.1", "libcuda.so", "libnccl.so.2"].map(|name| {
                let path = Some(self.directory.join(name));
                // SAFETY: the constructors of the fakes do nothing.
                let library = unsafe { Library::open(path, RTLD_NOW | RTLD_GLOBAL) };
                &*Box::leak(Box::new(library.unwrap()))
            });
            // SAFETY: the fake driver has both functions, with these types.
            let (set, note) = unsafe { (nccl.get("ppfake_set"), nccl.get("ppfake_note")) };
            Loaded {
                set: set.unwrap(),
                note: note.unwrap(),
                nccl,
            }
        })
    }
}

impl Loaded {
    /// Sets `PP_FAKE_{name}` for this process.
    ///
    /// # Panics
    ///
    /// If there are too many settings.
    pub fn set(&self, name: &str, value: &str) {
        let (name, value) = (CString::new(name).unwrap(), CString::new(value).unwrap());
        // SAFETY: two strings that end in zero; they are copied.
        let code = unsafe { (self.set)(name.as_ptr(), value.as_ptr()) };
        assert_eq!(code, 0, "too many settings");
    }

    /// Writes a line of the test's own into the recording.
    pub fn note(&self, line: &str) {
        let line = CString::new(line).unwrap();
        // SAFETY: a string that ends in zero; it is copied.
        unsafe { (self.note)(line.as_ptr()) }
    }

    /// A function of the fakes.
    ///
    /// # Safety
    ///
    /// `F` must be the type of the function.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the caller's promise.
        *unsafe { self.nccl.get::<F>(name) }.unwrap()
    }
}
