//! The libraries: how they are built, found and loaded.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The built libraries.
#[derive(Clone, Debug)]
pub struct Fakes {
    directory: PathBuf,
}

/// The fakes inside this process.
#[derive(Debug)]
pub struct Loaded {
    set: unsafe extern "C" fn(*const c_char, *const c_char) -> c_int,
    note: unsafe extern "C" fn(*const c_char),
}

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, symbol: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}
const RTLD_NOW: c_int = 2;
const RTLD_GLOBAL: c_int = 0x100;

const FLAGS: &[&str] = &[
    "-std=gnu11",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-shared",
];

impl Fakes {
    /// Both fakes, complete.
    pub fn build() -> Self {
        static BUILT: OnceLock<Fakes> = OnceLock::new();
        BUILT.get_or_init(|| Self::build_with(&[])).clone()
    }

    /// As an older NCCL, which lacks `ncclCommRevoke`.
    pub fn without_revoke() -> Self {
        static BUILT: OnceLock<Fakes> = OnceLock::new();
        BUILT
            .get_or_init(|| Self::build_with(&["-DPP_FAKE_NO_REVOKE"]))
            .clone()
    }

    fn build_with(defines: &[&str]) -> Self {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pp-fakes/c");
        let mut files: Vec<PathBuf> = std::fs::read_dir(&sources)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|end| end == "c" || end == "h"))
            .collect();
        files.sort();
        let mut hash = DefaultHasher::new();
        (defines, FLAGS).hash(&mut hash);
        for file in &files {
            std::fs::read(file).unwrap().hash(&mut hash);
        }
        let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let directory = tmp.join(format!("fakes-{:016x}", hash.finish()));
        if !directory.is_dir() {
            // Tests of other processes may build at the same moment: the process that renames first wins.
            let unfinished = tmp.join(format!("fakes-{}-{}", std::process::id(), hash.finish()));
            std::fs::create_dir_all(&unfinished).unwrap();
            compile(&files, &unfinished, defines);
            if std::fs::rename(&unfinished, &directory).is_err() {
                assert!(directory.is_dir(), "{}", directory.display());
                std::fs::remove_dir_all(&unfinished).unwrap();
            }
        }
        Self { directory }
    }

    /// Where the libraries are, for `LD_LIBRARY_PATH`.
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
    pub fn load(&self) -> &'static Loaded {
        static LOADED: OnceLock<Loaded> = OnceLock::new();
        LOADED.get_or_init(|| {
            // A later load of `libcuda.so`, `libcuda.so.1` or `libnccl.so.2` gets what is loaded already.
            let driver = open(&self.directory.join("libcuda.so.1"));
            open(&self.directory.join("libcuda.so"));
            open(&self.nccl());
            // SAFETY: both functions are in the library just built, with these types; it is never unloaded.
            unsafe {
                Loaded {
                    set: std::mem::transmute::<*mut c_void, _>(symbol(driver, c"ppfake_set")),
                    note: std::mem::transmute::<*mut c_void, _>(symbol(driver, c"ppfake_note")),
                }
            }
        })
    }
}

impl Loaded {
    /// Sets `PP_FAKE_{name}` for this process.
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
}

fn compile(files: &[PathBuf], to: &Path, defines: &[&str]) {
    let of = |prefix_is_nccl: bool| {
        files.iter().filter(move |file| {
            let name = file.file_name().unwrap().to_str().unwrap();
            name.ends_with(".c") && name.starts_with("nccl_") == prefix_is_nccl
        })
    };
    let cc = |name: &str| {
        let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        cc.args(FLAGS).args(defines);
        cc.arg(format!("-Wl,-soname,{name}"));
        cc.arg("-o").arg(to.join(name));
        cc.arg("-L").arg(to);
        cc
    };
    run(cc("libcuda.so.1").args(of(false)).arg("-lm"));
    // Some loaders ask for the name without a version first, and a real driver may have it: an empty library of that
    // name, through which the fake is found.
    run(cc("libcuda.so").args([
        "-x",
        "c",
        "/dev/null",
        "-Wl,-rpath,$ORIGIN,--no-as-needed",
        "-l:libcuda.so.1",
    ]));
    run(cc("libnccl.so.2")
        .args(of(true))
        .args(["-Wl,-rpath,$ORIGIN,--no-undefined", "-l:libcuda.so.1"]));
}

fn run(command: &mut Command) {
    let done = command.output().expect("a C compiler (cc, or $CC)");
    assert!(
        done.status.success(),
        "{command:?}\n{}",
        String::from_utf8_lossy(&done.stderr)
    );
}

fn open(path: &Path) -> *mut c_void {
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path ends in zero, and the library's constructors do nothing.
    let library = unsafe { dlopen(name.as_ptr(), RTLD_NOW | RTLD_GLOBAL) };
    assert!(!library.is_null(), "{}", last_error());
    library
}

fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: an open library, and a name that ends in zero.
    let found = unsafe { dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "{}", last_error());
    found
}

/// A function of the libraries loaded by [`Fakes::load`].
pub fn address_of(name: &CStr) -> *mut c_void {
    symbol(std::ptr::null_mut(), name)
}

fn last_error() -> String {
    // SAFETY: dlerror gives a string that ends in zero, or null; copied before the next call.
    unsafe {
        let text = dlerror();
        if text.is_null() {
            return "unknown error".into();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}
