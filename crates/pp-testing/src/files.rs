//! Files of tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder of a test's own, removed when the test passes.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// An empty folder of this name; what an earlier run left there is removed.
    pub fn new(parent: impl AsRef<Path>, name: &str) -> Self {
        let path = parent.as_ref().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path.canonicalize().unwrap())
    }

    /// An empty folder among the temporary files, for tests that have no other place.
    pub fn scratch() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let unique = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pp-test-{}-{unique}", std::process::id());
        Self::new(std::env::temp_dir(), &name)
    }

    /// A new named pipe in the folder.
    pub fn fifo(&self, name: &str) -> PathBuf {
        use rustix::fs::{CWD, FileType, mknodat};
        let path = self.file(name);
        mknodat(CWD, &path, FileType::Fifo, 0o600.into(), 0).unwrap();
        path
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A path in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file, and gives its path.
    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.file(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// The names of everything in the folder, hidden files too.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

/// Compiles a C library of this name from a text, and from these sources of the repository.
pub fn c_library(folder: &Folder, name: &str, text: &str, sources: &[&str]) -> PathBuf {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let source = folder.write(&format!("{name}.c"), text.as_bytes());
    let library = folder.file(&format!("{name}.so"));
    let mut compile = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
    compile.args(["-std=gnu11", "-shared", "-fPIC", "-O1", "-o"]);
    compile.arg(&library).arg(source);
    for place in ["", "crates/pp-kernels/include", "plugins/median"] {
        compile.arg("-I").arg(root.join(place));
    }
    compile.args(sources.iter().map(|source| root.join(source)));
    assert!(compile.status().expect("a C compiler").success());
    library
}
