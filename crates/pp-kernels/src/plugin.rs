//! The loader: from a file to a checked table, with the exact reason when it is refused.
//!
//! Hazard: a table is a set of raw function pointers of unknown origin. So nothing in it is called, and no field beyond
//! its head is read, before magic, version and size have been checked; then the smaller of its size and ours is copied
//! into a zeroed table of ours, in which an entry that is not there is `None`.
//!
//! A library is opened with `RTLD_NOW | RTLD_LOCAL` (a missing symbol fails here, not in the middle of a run) and never
//! closed: a library that has touched thread-local storage stays mapped anyway, and one that does not would leave
//! function pointers dangling. To swap kernels, load another file or start another process.

mod caller;
mod elf;
mod raw;
mod session;

use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use pp_device::Stream;

use crate::abi::{self, OpaqueSession, Table, TableHead};
use crate::config::{SessionConfig, Space};
use crate::denoise::cpu::Cpu;
use crate::denoise::cuda::Ptx;
use crate::error::{KernelError, LoadError, TableError};
use crate::export;
use crate::stage::{Description, StageInfo};

use caller::{Caller, ResultsFn, bad_call};
pub use raw::RawSession;
pub use session::StageSession;

/// A set of kernels that is built in: its table, and what the table does not tell.
type BuiltIn = (fn() -> Table, Option<ResultsFn>);

const BUILT_IN: [BuiltIn; 2] = [
    (export::table::<Cpu>, None),
    (export::table::<Ptx>, Some(results_of_ptx)),
];

/// # Safety
/// As [`export::held`].
unsafe fn results_of_ptx(session: *mut OpaqueSession) -> Stream {
    // SAFETY: the caller's duty.
    unsafe { export::held::<Ptx>(session) }.results().clone()
}

/// A checked table of kernels: built in, or from a file.
#[derive(Clone)]
pub struct KernelSet {
    caller: Caller,
    description: Description,
}

impl fmt::Debug for KernelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelSet")
            .field("description", &self.description)
            .finish_non_exhaustive()
    }
}

impl KernelSet {
    /// The kernels that are built in; they go through the same table as a file's, and describe themselves on any
    /// machine. The first for a kind of memory are the default there.
    ///
    /// # Panics
    /// Never: their tables and descriptions are constants, and a test loads them.
    pub fn built_in() -> impl Iterator<Item = KernelSet> {
        BUILT_IN.into_iter().map(|(table, results)| {
            Self::from_table(table(), results).expect("the built-in kernels describe themselves")
        })
    }

    /// The built-in kernels of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<KernelSet> {
        Self::built_in().find(|set| set.description.name == name)
    }

    /// The default kernels in host memory.
    #[must_use]
    pub fn for_host() -> KernelSet {
        Self::first(|about| about.host)
    }

    /// The default kernels in the memory of a device.
    #[must_use]
    pub fn for_device() -> KernelSet {
        Self::first(|about| about.cuda)
    }

    fn first(serves: impl Fn(&Description) -> bool) -> KernelSet {
        Self::built_in()
            .find(|set| serves(&set.description))
            .expect("there are built-in kernels for each kind of memory")
    }

    /// Loads a file, asks it to describe itself and runs its self test.
    ///
    /// Loading a library runs its constructors: the checks cannot make a hostile file safe. Load what you trust.
    ///
    /// # Errors
    /// The exact reason for which the file is refused.
    pub fn load(path: &Path) -> Result<KernelSet, LoadError> {
        let set = Self::load_untested(path)?;
        match set.self_test() {
            Ok(()) => Ok(set),
            Err(source) => Err(LoadError::SelfTest {
                path: path.into(),
                source,
            }),
        }
    }

    /// Like [`KernelSet::load`], without the self test.
    ///
    /// # Errors
    /// The exact reason for which the file is refused.
    pub fn load_untested(path: &Path) -> Result<KernelSet, LoadError> {
        let table = open(path)?;
        Self::from_table(table, None).map_err(|source| LoadError::Describe {
            path: path.into(),
            source,
        })
    }

    fn from_table(table: Table, results: Option<ResultsFn>) -> Result<KernelSet, KernelError> {
        let mut caller = Caller {
            table,
            name: "(not yet named)".into(),
            results,
        };
        let description = caller.describe()?;
        caller.name = description.name.as_str().into();
        Ok(KernelSet {
            caller,
            description,
        })
    }

    /// What the kernels say about themselves.
    #[must_use]
    pub fn describe(&self) -> &Description {
        &self.description
    }

    /// The stages in the order of the pipeline: a source, middle stages, a sink.
    #[must_use]
    pub fn stages(&self) -> &[StageInfo] {
        &self.description.stages
    }

    /// The names of source, middle stage and sink, of kernels that have one of each.
    ///
    /// # Errors
    /// Kernels with another number of middle stages.
    pub fn three_stages(&self) -> Result<[&str; 3], KernelError> {
        match self.stages() {
            [source, middle, sink] => Ok([&source.name, &middle.name, &sink.name]),
            stages => {
                let (name, middle) = (&self.description.name, stages.len() - 2);
                let reason =
                    format!("kernels {name} have {middle} middle stages, one is needed here");
                Err(bad_call("open", reason))
            }
        }
    }

    /// Asks once more: the answer must not change.
    pub(crate) fn describe_again(&self) -> Result<Description, KernelError> {
        self.caller.describe()
    }

    /// Runs the kernels' own test; kernels without one pass.
    ///
    /// # Errors
    /// Their words.
    pub fn self_test(&self) -> Result<(), KernelError> {
        let Some(self_test) = self.caller.table.self_test else {
            return Ok(());
        };
        // SAFETY: a non-null entry of a checked table has this signature, and the error text outlives the call.
        (self.caller).call("self_test", |error| unsafe { self_test(error) })
    }

    /// Makes a session of one stage on host memory, with the user's `args`.
    ///
    /// # Errors
    /// No stage of this name; a configuration out of range or for CUDA, or one that the stage does not serve; an argument
    /// that the kernels refuse.
    pub fn open_stage(
        &self,
        name: &str,
        config: &SessionConfig,
        args: &[(String, String)],
    ) -> Result<StageSession, KernelError> {
        if config.space != Space::Host {
            return Err(self.wrong_space(
                "the configuration is for CUDA memory; open it with open_stage_on_device".into(),
            ));
        }
        // SAFETY: a session on host memory names no context and no stream.
        unsafe { self.open_raw(name, config, args) }.map(StageSession::of)
    }

    /// Makes a session of one stage in CUDA memory, whose calls enqueue work on the configuration's stream.
    ///
    /// # Safety
    /// `config.space` holds a live `CUcontext`, current on the calling thread, and a live `CUstream` of it. Both
    /// outlive the session, which is dropped with the context current too.
    ///
    /// # Errors
    /// As [`KernelSet::open_stage`], with host memory in place of CUDA; no driver, or a device that cannot run them.
    pub unsafe fn open_stage_on_device(
        &self,
        name: &str,
        config: &SessionConfig,
        args: &[(String, String)],
    ) -> Result<RawSession, KernelError> {
        if config.space == Space::Host {
            return Err(self.wrong_space(
                "the configuration is for host memory; open it with open_stage".into(),
            ));
        }
        // SAFETY: the caller's duty.
        unsafe { self.open_raw(name, config, args) }
    }

    /// Makes a session of one stage in memory of either kind.
    ///
    /// # Safety
    /// As [`KernelSet::open_stage_on_device`], for a configuration in CUDA memory.
    pub(crate) unsafe fn open_raw(
        &self,
        name: &str,
        config: &SessionConfig,
        args: &[(String, String)],
    ) -> Result<RawSession, KernelError> {
        let refused = match config.space {
            Space::Host if !self.description.host => {
                "they work in CUDA memory only; run them on a GPU with --transport nccl, or choose kernels for host \
                 memory (--kernels cpu)"
            }
            Space::Cuda { .. } if !self.description.cuda => {
                "they work in host memory only; run them with --transport host, or choose kernels for CUDA (--kernels \
                 ptx)"
            }
            Space::Cuda { context: 0, .. } => "the configuration names no CUDA context",
            _ => {
                let (stage, of) = (self.stage(name)?, (self.description.bits, config));
                // SAFETY: the caller's duty.
                return unsafe { RawSession::open(self.caller.clone(), stage, of, args) };
            }
        };
        Err(self.wrong_space(refused.into()))
    }

    /// Number and description of a stage.
    fn stage(&self, name: &str) -> Result<(u32, &StageInfo), KernelError> {
        let found = (0..)
            .zip(self.stages())
            .find(|(_, stage)| stage.name == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.stages().iter().map(|stage| &stage.name[..]).collect();
            let (kernels, names) = (&self.description.name, names.join(", "));
            let reason = format!("kernels {kernels} have no stage {name}; theirs are {names}");
            bad_call("open", reason)
        })
    }

    fn wrong_space(&self, reason: String) -> KernelError {
        KernelError::WrongSpace {
            kernels: self.description.name.clone(),
            reason,
        }
    }
}

/// The linker's error. Of a library that is not there it says nothing but the name, so the remedy is added.
fn refused(path: &Path, source: libloading::Error) -> LoadError {
    let words = std::error::Error::source(&source).map(ToString::to_string);
    let missing = words.as_deref().and_then(|words| {
        words.strip_suffix(": cannot open shared object file: No such file or directory")
    });
    match missing {
        Some(library) => LoadError::NeedsLibrary {
            path: path.into(),
            library: library.into(),
        },
        None => LoadError::Linker {
            path: path.into(),
            source,
        },
    }
}

/// Opens the library and copies its table.
fn open(path: &Path) -> Result<Table, LoadError> {
    elf::look_at(path)?;
    // The linker searches its own path for a name without a slash: give it the absolute one.
    let absolute = path
        .canonicalize()
        .map_err(|source| LoadError::Unreadable {
            path: path.into(),
            source,
        })?;
    // SAFETY: running the library's constructors is what loading means; the caller chose to trust the file.
    let library = unsafe { Library::open(Some(&absolute), RTLD_NOW | RTLD_LOCAL) };
    let library = library.map_err(|source| refused(path, source))?;
    let library = ManuallyDrop::new(library);
    // SAFETY: the symbol of this name is a function of this signature in every plugin of ABI version 2.
    let entry = match unsafe { library.get::<abi::EntryFn>(abi::ENTRY_SYMBOL) } {
        Ok(entry) => entry,
        Err(source) => {
            // SAFETY: the symbol is looked for, and not called.
            let is_old = unsafe { library.get::<abi::EntryFn>(abi::OLD_ENTRY_SYMBOL) }.is_ok();
            let path = path.into();
            return Err(match is_old {
                true => LoadError::OldEntry { path },
                false => LoadError::NoEntry { path, source },
            });
        }
    };
    // SAFETY: the entry takes nothing and may be called at any time.
    let table = unsafe { entry() };
    // SAFETY: the pointer comes from the entry symbol, whose contract is to return null or a table that lives as long
    // as the library, and the library is never closed.
    unsafe { copy_table(table) }.map_err(|reason| LoadError::Table {
        path: path.into(),
        reason,
    })
}

/// Checks the head, then copies as much as both sides know.
///
/// # Safety
/// `table` is null, or points to as many readable bytes as its own head says, and at least to a head.
unsafe fn copy_table(table: *const Table) -> Result<Table, TableError> {
    if table.is_null() {
        return Err(TableError::Null);
    }
    if !table.is_aligned() {
        return Err(TableError::Misaligned {
            address: table as usize,
            align: align_of::<Table>(),
        });
    }
    // SAFETY: not null, aligned, and at least a head is readable (the caller's duty).
    let head = unsafe { table.cast::<TableHead>().read() };
    if head.magic != abi::MAGIC {
        return Err(TableError::Magic { found: head.magic });
    }
    if head.major != abi::MAJOR {
        return Err(TableError::Major {
            found_major: head.major,
            found_minor: head.minor,
        });
    }
    if head.struct_size < abi::TABLE_REQUIRED_BYTES {
        return Err(TableError::TooShort {
            found: head.struct_size,
        });
    }
    // SAFETY: zero is a value of every field: of numbers, and of an optional function, where it is `None`.
    let mut ours: Table = unsafe { std::mem::zeroed() };
    let bytes = (head.struct_size as usize).min(size_of::<Table>());
    // SAFETY: `bytes` is at most what either side holds; every bit pattern of a pointer-sized word is a valid
    // `Option<fn>`, null being `None`; whole words are copied because the entries are pointer-sized and the required
    // part ends at one, and a size that ends inside an entry is cut to the last whole one here.
    unsafe {
        let whole = bytes - bytes % size_of::<usize>();
        std::ptr::copy_nonoverlapping(table.cast::<u8>(), (&raw mut ours).cast::<u8>(), whole);
    }
    let required = [
        ("describe", ours.describe.is_some()),
        ("create", ours.create.is_some()),
        ("destroy", ours.destroy.is_some()),
        ("layout", ours.layout.is_some()),
        ("run", ours.run.is_some()),
    ];
    match required.into_iter().find(|(_, there)| !there) {
        None => Ok(ours),
        Some((name, _)) => Err(TableError::MissingEntry { name }),
    }
}
