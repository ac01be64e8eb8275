//! Finding a library and seeing whether it can be used.

use std::env;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::bindings::{NCCL_MAJOR, Symbols, ncclResult_t, ncclUniqueId};
use crate::error::{LoadError, NcclError, Reason, Rejected};
use crate::functions::Functions;
use crate::library::{LIBRARY_VARIABLE, MINIMUM, Origin, Version};

/// What the dynamic linker is asked for: the name in the library's own header first, then that of a development package.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Keeps the library in memory when the last handle is closed: NCCL starts threads of its own, and pointers into it are
/// handed out.
const RTLD_NODELETE: c_int = 0x1000;

/// The library in a wheel of the `python3` on `PATH`, or why there is none.
fn in_wheels() -> Result<PathBuf, String> {
    let places = pp_wheels::wheels()?.into_iter();
    places
        .map(|place| place.join("nccl/lib/libnccl.so.2"))
        .find(|library| library.is_file())
        .ok_or_else(|| "python3 has no package with nvidia/nccl/lib/libnccl.so.2".to_owned())
}

/// A loaded NCCL. Clones are the same library.
#[derive(Clone)]
pub struct Nccl(Arc<Loaded>);

struct Loaded {
    functions: Functions,
    path: PathBuf,
    origin: Origin,
    version: Version,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} at {}", self.version(), self.path().display())
    }
}

impl Nccl {
    /// The library that [`LIBRARY_VARIABLE`] names; without it, the first usable one of those that the dynamic linker
    /// finds as `libnccl.so.2` and `libnccl.so`, and the one in the package of the `python3` on `PATH`.
    ///
    /// Takes milliseconds, and up to some seconds when a Python must be asked: call it once.
    ///
    /// # Errors
    ///
    /// [`LoadError::Named`] when the variable is set and its library cannot be used, [`LoadError::NotFound`] with the
    /// reason for each place otherwise.
    pub fn load() -> Result<Nccl, LoadError> {
        if let Some(named) = env::var_os(LIBRARY_VARIABLE).filter(|named| !named.is_empty()) {
            return attempt(&named, Origin::Variable).map_err(LoadError::Named);
        }
        let mut rejected = Vec::new();
        for name in NAMES {
            match attempt(name.as_ref(), Origin::Linker) {
                Ok(nccl) => return Ok(nccl),
                Err(why) => rejected.push(why),
            }
        }
        match in_wheels().map(|path| attempt(path.as_os_str(), Origin::Python)) {
            Ok(Ok(nccl)) => return Ok(nccl),
            Ok(Err(why)) => rejected.push(why),
            Err(why) => rejected.push(Rejected {
                library: PathBuf::new(),
                origin: Origin::Python,
                reason: Reason::NoPackage(why),
            }),
        }
        Err(LoadError::NotFound(rejected))
    }

    /// The library at `path`, or what the dynamic linker finds when `path` is a bare name.
    ///
    /// # Errors
    ///
    /// [`LoadError::Rejected`].
    pub fn open(path: impl AsRef<Path>) -> Result<Nccl, LoadError> {
        attempt(path.as_ref().as_os_str(), Origin::Caller).map_err(LoadError::Rejected)
    }

    /// The file that is really mapped, links followed.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Who named it.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.0.origin
    }

    /// What it says its version is.
    #[must_use]
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// What this project calls.
    #[must_use]
    pub fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// A new identifier for one communicator. Every process that has it can join: it must not be shown.
    ///
    /// Starts a thread that listens on a port for the ranks to come.
    ///
    /// # Errors
    ///
    /// [`NcclError`], for example when no network interface can be used (`NCCL_SOCKET_IFNAME`).
    pub fn unique_id(&self) -> Result<ncclUniqueId, NcclError> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: the function writes one identifier to the address, which is ours for the call.
        let result = unsafe { (self.functions().ncclGetUniqueId)(&raw mut id) };
        self.check("ncclGetUniqueId", result)?;
        Ok(id)
    }

    /// Turns what `call` returned into an error with the library's words, unless it is `ncclSuccess`.
    ///
    /// # Errors
    ///
    /// [`NcclError`]; also for `ncclInProgress`, which callers with non-blocking communicators look at first.
    pub fn check(&self, call: &'static str, result: ncclResult_t) -> Result<(), NcclError> {
        if result.is_success() {
            return Ok(());
        }
        // SAFETY: takes any code and returns a constant text.
        let text = unsafe { (self.functions().ncclGetErrorString)(result) };
        // SAFETY: a null communicator is allowed: the text belongs to the process, not to a communicator.
        let last = unsafe { (self.functions().ncclGetLastError)(ptr::null_mut()) };
        Err(NcclError {
            call,
            result,
            // SAFETY: null or a constant text.
            text: unsafe { text_at(text) },
            // SAFETY: null or a buffer of the library whose last byte is always 0. Another thread that fails in NCCL at
            // this moment can mix two messages, never run past the end.
            last: unsafe { text_at(last) },
        })
    }
}

/// # Safety
///
/// `text` is null or ends with a 0.
unsafe fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller says so.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().trim().to_owned()
}

/// Opens `library` and sees whether it can be used.
fn attempt(library: &OsStr, origin: Origin) -> Result<Nccl, Rejected> {
    open(library, origin)
        .map(|loaded| Nccl(Arc::new(loaded)))
        .map_err(|reason| Rejected {
            library: library.into(),
            origin,
            reason,
        })
}

fn open(library: &OsStr, origin: Origin) -> Result<Loaded, Reason> {
    // All of it is bound now, so that nothing is missing in the middle of a transfer; and its symbols, among them a whole
    // CUDA runtime, stay its own.
    let flags = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;
    // SAFETY: initializers of the library run; that it is what the user wants to run is all that can be said.
    let opened = unsafe { Library::open(Some(library), flags) };
    let opened = opened.map_err(|error| Reason::NotLoaded(words(&error)))?;
    // SAFETY: a function of this name has the type of NCCL's header. Whether the file is an NCCL is known only after the
    // version was asked for, which is the one function with the same type in every NCCL there was.
    let symbols = unsafe { Symbols::of(opened.into()) };
    let functions = Functions::of(&symbols)?;
    let version = version(&functions)?;
    if version.major != NCCL_MAJOR {
        return Err(Reason::OtherMajor(version));
    }
    if version < MINIMUM {
        return Err(Reason::TooOld(version));
    }
    let address = functions.ncclGetVersion as usize;
    let path = fs::read_to_string("/proc/self/maps")
        .ok()
        .and_then(|maps| mapped_at(&maps, address))
        .unwrap_or_else(|| library.into());
    Ok(Loaded {
        functions,
        path,
        origin,
        version,
    })
}

fn version(functions: &Functions) -> Result<Version, Reason> {
    let mut code: c_int = 0;
    // SAFETY: writes one int to the address, which is ours for the call.
    let result = unsafe { (functions.ncclGetVersion)(&raw mut code) };
    if !result.is_success() {
        return Err(Reason::NoVersion(result));
    }
    Ok(Version::from_code(u32::try_from(code).unwrap_or(0)))
}

/// The dynamic linker's own words, which libloading has as the cause.
fn words(error: &libloading::Error) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or_else(|| error.to_string(), ToString::to_string)
}

/// The file that `/proc/self/maps` has at `address`.
fn mapped_at(maps: &str, address: usize) -> Option<PathBuf> {
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        let path = &rest[rest.find('/')?..];
        (start..end).contains(&address).then(|| path.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mapping_of_an_address() {
        let maps = "1000-2000 r-xp 00000000 fe:01 12    /usr/lib/a b.so\n2000-3000 rw-p 00000000 00:00 0 \n";
        assert_eq!(
            mapped_at(maps, 0x1fff),
            Some(PathBuf::from("/usr/lib/a b.so"))
        );
        assert_eq!(mapped_at(maps, 0x2000), None);
        assert_eq!(mapped_at(maps, 0x3000), None);
    }
}
