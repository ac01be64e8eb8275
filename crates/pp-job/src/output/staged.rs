//! A file that appears under its name only when it is complete and stored.
//!
//! It is written without any name (`O_TMPFILE`), so a process that is killed leaves nothing. A commit syncs it, links it
//! to a hidden name beside the final one, and renames it. Where the file system has no unnamed files the file has the
//! hidden name from the start: a drop removes it, [`discard_hidden`] does so where a process ends without drops, and only
//! a kill leaves it behind. FIFOs, devices and standard output are written directly. Sockets have no writer by name and
//! are refused.
//!
//! A file that is to be *kept* ([`StagedFile::keep`]) has a name of its own beside the final one from the start, so that
//! not even a kill takes it away. It is locked while it is written: no other process cuts it or goes on in it.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{Access, AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;

use super::error::OutputError;
use super::patient::Patient;
use super::place::{is_descriptor, is_stdout, resolve};
use super::stdout::stdout;

/// The hidden files of this process. A process has one end, so there is one list.
static HIDDEN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn hidden() -> MutexGuard<'static, Vec<PathBuf>> {
    // Each critical section changes the list in one step.
    HIDDEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes the hidden files of this process below `folder`: for an end of it that drops nothing.
pub(crate) fn discard_hidden(folder: &Path) {
    for path in hidden().extract_if(.., |path| path.starts_with(folder)) {
        let _ = fs::remove_file(path);
    }
}

/// Says whether there is a hidden file to remove.
pub(crate) fn has_hidden() -> bool {
    !hidden().is_empty()
}

/// The file system type of tmpfs, from `linux/magic.h`.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Writes a whole file, or leaves what was there.
///
/// # Errors
/// As those of [`StagedFile`].
pub fn write_file(
    target: &Path,
    write: impl FnOnce(&mut BufWriter<&mut StagedFile>) -> io::Result<()>,
) -> Result<(), OutputError> {
    let mut file = StagedFile::create(target)?;
    let mut out = BufWriter::new(&mut file);
    let written = write(&mut out).and_then(|()| out.flush());
    drop(out);
    written.map_err(|e| file.write_error(e))?;
    file.commit()
}

/// Says whether a file could be written there; leaves nothing behind.
///
/// # Errors
/// As [`StagedFile::create`].
pub fn can_be_created(target: &Path) -> Result<(), OutputError> {
    // A FIFO would wait for its reader, who would then see its end.
    if is_stdout(target) || fs::metadata(target).is_ok_and(|there| is_direct(&there)) {
        return Ok(());
    }
    StagedFile::create(target).map(drop)
}

/// The name of an output that is kept before it is finished: `.part` stands behind that of the file. None where it is
/// written directly, as pipes and devices are.
pub fn kept_name(target: &Path) -> Option<PathBuf> {
    let target = resolve(target);
    if is_stdout(&target) || fs::metadata(&target).is_ok_and(|there| !there.is_file()) {
        return None;
    }
    let mut name = target.file_name()?.to_owned();
    name.push(".part");
    Some(target.with_file_name(name))
}

/// Says whether this process is the only one to write the file, from now on until it closes it.
pub fn is_locked(file: &File) -> bool {
    // Where the file system has no locks there is nothing to ask.
    flock(file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
}

/// An output that was opened and is not yet committed.
///
/// # If dropped
/// Nothing written to a regular file remains, unless it is to be kept; bytes written to a pipe or device stay written.
#[derive(Debug)]
pub struct StagedFile {
    file: Patient<File>,
    target: PathBuf,
    stage: Stage,
    written: u64,
}

#[derive(Debug)]
enum Stage {
    /// No name yet; the hidden one it will have in between.
    Unnamed(PathBuf),
    /// Under its hidden name, which stands in [`HIDDEN`].
    Hidden(PathBuf),
    /// Under the name that it keeps where it is not committed.
    Kept(PathBuf),
    /// Written directly, or committed.
    Direct,
}

impl Stage {
    fn hidden(path: PathBuf) -> Self {
        hidden().push(path.clone());
        Self::Hidden(path)
    }
}

impl StagedFile {
    /// Opens the way to `target`, where `-` is standard output. A symbolic link is followed, also one to a file that
    /// does not exist yet.
    ///
    /// # Errors
    /// A directory, or one that cannot be written to: before any work is done, not after.
    pub fn create(target: &Path) -> Result<Self, OutputError> {
        Self::open(target, |path| {
            let hidden = hidden_name(path).ok_or(Errno::INVAL)?;
            open_unseen(path, hidden)
        })
    }

    /// As [`StagedFile::create`]; but a regular file is written under [`kept_name`] and keeps it until the commit. With
    /// `bytes` the file is there already: it is cut behind so many of them, and written on.
    ///
    /// # Errors
    /// As [`StagedFile::create`]; and a file of that name is there although it should be new, is not there although it
    /// should be, or is written by another process.
    pub fn keep(target: &Path, bytes: u64) -> Result<Self, OutputError> {
        let Some(kept) = kept_name(target) else {
            return Self::create(target);
        };
        let refuse = |why: &str| OutputError::Kept(kept.as_path().into(), why.into());
        let opened = Self::open(target, |_| {
            let mut how = File::options();
            let file = how.write(true).create_new(bytes == 0).open(&kept)?;
            Ok((file, Stage::Kept(kept.clone())))
        });
        let mut staged = match opened {
            Err(_) if bytes == 0 && kept.exists() => {
                return Err(refuse(
                    "is left of a job that ended early; go on in it with --skip, or remove it",
                ));
            }
            opened => opened?,
        };
        if !is_locked(&staged.file.0) {
            return Err(refuse(
                "another job writes it; wait for its end, or choose another --output",
            ));
        }
        let cut = staged.file.0.set_len(bytes);
        let ready = cut.and_then(|()| staged.file.0.seek(SeekFrom::Start(bytes)));
        ready.map_err(|error| staged.write_error(error))?;
        staged.written = bytes;
        Ok(staged)
    }

    /// Finds out what `target` is. `open` opens the regular file that is to become it.
    fn open(
        target: &Path,
        open: impl FnOnce(&Path) -> io::Result<(File, Stage)>,
    ) -> Result<Self, OutputError> {
        let failed = |source: io::Error| OutputError::Create {
            path: target.into(),
            source,
        };
        if is_stdout(target) {
            let stdout = stdout().try_clone_to_owned().map_err(failed)?;
            return Ok(Self::new(File::from(stdout), target, Stage::Direct));
        }
        let final_path = resolve(target);
        match fs::metadata(&final_path) {
            Ok(there) if there.is_dir() => {
                return Err(OutputError::IsDirectory(target.into()));
            }
            Ok(there) if there.file_type().is_socket() => {
                return Err(OutputError::IsSocket(target.into()));
            }
            Ok(there) if is_direct(&there) => {
                let file = File::options()
                    .write(true)
                    .open(&final_path)
                    .map_err(failed)?;
                return Ok(Self::new(file, target, Stage::Direct));
            }
            Ok(there) if is_descriptor(target) && there.is_file() => {
                return Err(OutputError::IsDescriptor(target.into()));
            }
            Ok(there) if !may_be_replaced(&final_path, &there) => {
                return Err(OutputError::Protected(target.into()));
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidFilename => {
                return Err(failed(error));
            }
            _ => {}
        }
        let refused = |source: io::Error| {
            let is_missing = source.kind() == io::ErrorKind::NotFound;
            // Where the folder is there, it is the file system that makes no entry in it.
            if is_missing && folder_of(&final_path).is_dir() {
                let path = target.into();
                return OutputError::NoNewFiles { path, source };
            }
            failed(source)
        };
        let (file, stage) = open(&final_path).map_err(refused)?;
        if let Ok(there) = fs::metadata(&final_path) {
            // What was closed to others stays closed. Refused where the file is not ours.
            let _ = file.set_permissions(there.permissions());
        }
        Ok(Self::new(file, &final_path, stage))
    }

    /// A file without a name, which the caller has opened.
    ///
    /// # Errors
    /// The target is no name of a file.
    pub fn unnamed(file: File, target: &Path) -> Result<Self, OutputError> {
        let hidden = hidden_name(target).ok_or_else(|| OutputError::IsDirectory(target.into()))?;
        Ok(Self::new(file, target, Stage::Unnamed(hidden)))
    }

    fn new(file: File, target: &Path, stage: Stage) -> Self {
        Self {
            file: Patient(file),
            target: target.to_path_buf(),
            stage,
            written: 0,
        }
    }

    /// Syncs the file and gives it its name, in place of what had it.
    ///
    /// # Errors
    /// The file cannot be stored or named; what had the name still has it.
    pub fn commit(mut self) -> Result<(), OutputError> {
        self.name_it().map_err(|source| OutputError::Commit {
            path: self.target.as_path().into(),
            source,
        })
    }

    fn name_it(&mut self) -> io::Result<()> {
        if !matches!(self.stage, Stage::Direct) {
            // Some file systems find out only now that they have no room, and a power cut must not leave a name without
            // its bytes.
            self.file.0.sync_all()?;
        }
        if let Stage::Unnamed(hidden) = &self.stage {
            let hidden = hidden.clone();
            // Left by a killed process with our id, if at all.
            let _ = fs::remove_file(&hidden);
            let unnamed = format!("/proc/self/fd/{}", self.file.0.as_raw_fd());
            // Before it is there, so that it is removed whenever this process ends.
            self.stage = Stage::hidden(hidden.clone());
            rustix::fs::linkat(CWD, unnamed, CWD, &hidden, AtFlags::SYMLINK_FOLLOW)?;
        }
        if let Stage::Hidden(path) | Stage::Kept(path) = &self.stage {
            fs::rename(path, &self.target)?;
            hidden().retain(|other| other != path);
            self.stage = Stage::Direct;
        }
        Ok(())
    }

    /// The file, where it lies in memory and only this process can reach it: such a file can be mapped and written by
    /// several threads.
    pub fn in_memory(&self) -> Option<&File> {
        let is_tmpfs = |file: &&File| {
            rustix::fs::fstatfs(file).is_ok_and(|about| about.f_type as u64 == TMPFS_MAGIC)
        };
        let is_unnamed = matches!(self.stage, Stage::Unnamed(_));
        Some(&self.file.0).filter(|_| is_unnamed).filter(is_tmpfs)
    }

    /// Makes the file longer by so many bytes, all of which have room from then on, and says where they begin.
    pub fn extend(&mut self, bytes: u64) -> io::Result<u64> {
        let at = self.written;
        rustix::fs::fallocate(&self.file.0, FallocateFlags::empty(), at, bytes)?;
        self.written += bytes;
        Ok(at)
    }

    /// Bytes in the file, those included that it was opened with.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// An error of a write to this file, with its name and how far it came.
    pub fn write_error(&self, source: io::Error) -> OutputError {
        OutputError::Write {
            path: self.target.as_path().into(),
            bytes: self.written,
            source,
        }
    }
}

impl Write for StagedFile {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let n = self.file.write(buf)?;
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        if let Stage::Hidden(path) = &self.stage {
            // A leftover would be hidden, and there is nowhere to report it.
            let _ = fs::remove_file(path);
            hidden().retain(|other| other != path);
        }
    }
}

fn is_direct(metadata: &fs::Metadata) -> bool {
    let kind = metadata.file_type();
    kind.is_fifo() || kind.is_char_device() || kind.is_block_device()
}

/// Says whether this user may replace the file. A rename asks the folder alone, so a write-protected file would go, too; and in a
/// folder with the sticky bit the kernel would say so only when all work is done.
fn may_be_replaced(path: &Path, there: &fs::Metadata) -> bool {
    let denied = rustix::fs::access(path, Access::WRITE_OK).err();
    if matches!(denied, Some(Errno::ACCESS | Errno::PERM)) {
        return false;
    }
    let me = rustix::process::geteuid();
    let is_mine = |about: &fs::Metadata| about.uid() == me.as_raw();
    let is_kept = |folder: fs::Metadata| folder.mode() & 0o1000 != 0 && !is_mine(&folder);
    me.is_root() || is_mine(there) || !fs::metadata(folder_of(path)).is_ok_and(is_kept)
}

/// A name beside that of the file, and none other of this process. It leaves out the file's own, which may have all the
/// bytes that a name can have.
fn hidden_name(path: &Path) -> Option<PathBuf> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    path.file_name()?;
    Some(path.with_file_name(format!(".pp-{}-{number}.part", std::process::id())))
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn open_unseen(path: &Path, hidden: PathBuf) -> io::Result<(File, Stage)> {
    let mode = Mode::from_raw_mode(0o666);
    match rustix::fs::open(
        folder_of(path),
        OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC,
        mode,
    ) {
        Ok(fd) => Ok((File::from(fd), Stage::Unnamed(hidden))),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => open_hidden(hidden),
        Err(errno) => Err(errno.into()),
    }
}

fn open_hidden(hidden: PathBuf) -> io::Result<(File, Stage)> {
    let _ = fs::remove_file(&hidden);
    let file = File::options().write(true).create_new(true).open(&hidden)?;
    Ok((file, Stage::hidden(hidden)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pp_testing::Folder;

    #[test]
    fn nothing_is_seen_before_the_commit_and_nothing_but_the_file_after() {
        for name in ["out.y4m".to_owned(), "a".repeat(255)] {
            let scratch = Folder::scratch();
            let path = scratch.file(&name);
            let mut staged = StagedFile::create(&path).unwrap();
            staged.write_all(b"all of it").unwrap();
            assert!(!path.exists());
            staged.commit().unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"all of it");
            assert_eq!(scratch.names(), [name]);
        }
    }

    #[test]
    fn a_drop_leaves_nothing_and_what_was_there_before_stays() {
        let scratch = Folder::scratch();
        let path = scratch.file("out.y4m");
        fs::write(&path, b"older").unwrap();
        let mut staged = StagedFile::create(&path).unwrap();
        staged.write_all(b"half").unwrap();
        drop(staged);
        assert_eq!(fs::read(&path).unwrap(), b"older");
        assert_eq!(scratch.names(), ["out.y4m"]);
    }

    #[test]
    fn where_unnamed_files_are_missing_a_hidden_one_is_used_and_removed() {
        let scratch = Folder::scratch();
        let target = scratch.file("out.y4m");
        let staged = |contents: &[u8]| {
            let (mut file, stage) = open_hidden(hidden_name(&target).unwrap()).unwrap();
            file.write_all(contents).unwrap();
            StagedFile {
                file: Patient(file),
                target: target.clone(),
                stage,
                written: 0,
            }
        };
        let dropped = staged(b"half");
        assert_eq!(scratch.names().len(), 1);
        drop(dropped);
        assert!(scratch.names().is_empty());
        let ended = staged(b"half");
        discard_hidden(scratch.path());
        assert!(scratch.names().is_empty());
        drop(ended);
        staged(b"whole").commit().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"whole");
        assert_eq!(scratch.names(), ["out.y4m"]);
    }

    #[test]
    fn a_kept_file_has_a_name_from_the_start_is_written_by_one_and_gone_on_in() {
        let scratch = Folder::scratch();
        let path = scratch.file("out.y4m");
        fs::write(&path, b"older").unwrap();
        let mut staged = StagedFile::keep(&path, 0).unwrap();
        staged.write_all(b"half of it").unwrap();
        let refused = |bytes| StagedFile::keep(&path, bytes).unwrap_err().to_string();
        assert!(refused(4).contains("out.y4m.part: another job writes it"));
        drop(staged);
        assert_eq!(scratch.names(), ["out.y4m", "out.y4m.part"]);
        assert!(refused(0).contains("go on in it with --skip, or remove it"));
        let mut staged = StagedFile::keep(&path, 4).unwrap();
        assert_eq!(staged.written(), 4);
        staged.write_all(b", and the rest").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"older");
        staged.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"half, and the rest");
        assert_eq!(scratch.names(), ["out.y4m"]);
        assert!(refused(4).contains("No such file"));
        assert_eq!(kept_name(Path::new("/dev/null")), None);
        assert_eq!(kept_name(Path::new("-")), None);
    }

    #[test]
    fn an_existing_file_is_replaced_also_through_a_link() {
        let scratch = Folder::scratch();
        let (path, link) = (scratch.file("out.y4m"), scratch.file("link"));
        fs::write(&path, b"older").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let mut staged = StagedFile::create(&link).unwrap();
        staged.write_all(b"newer").unwrap();
        staged.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"newer");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn a_file_that_cannot_be_stored_leaves_what_was_there() {
        let scratch = Folder::scratch();
        let target = scratch.file("out.y4m");
        fs::write(&target, b"older").unwrap();
        // A pipe takes bytes and cannot be synced.
        let (_reader, pipe) = io::pipe().unwrap();
        let pipe = File::from(std::os::fd::OwnedFd::from(pipe));
        let message = StagedFile::unnamed(pipe, &target)
            .unwrap()
            .commit()
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("out.y4m: complete, but cannot be stored"),
            "{message}"
        );
        assert_eq!(fs::read(&target).unwrap(), b"older");
        assert_eq!(scratch.names(), ["out.y4m"]);
    }

    #[test]
    fn a_link_to_a_file_that_does_not_exist_is_followed_and_a_socket_is_refused() {
        let scratch = Folder::scratch();
        let (link, socket) = (scratch.file("link"), scratch.file("socket"));
        std::os::unix::fs::symlink("new", &link).unwrap();
        StagedFile::create(&link).unwrap().commit().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let message = StagedFile::create(&socket).unwrap_err().to_string();
        assert!(message.contains("socket: is a socket"), "{message}");
        assert_eq!(scratch.names(), ["link", "new", "socket"]);
    }

    #[test]
    fn a_replaced_file_keeps_its_permissions() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = Folder::scratch();
        let path = scratch.file("out.y4m");
        fs::write(&path, b"older").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        StagedFile::create(&path).unwrap().commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn devices_are_written_directly_and_a_full_one_is_named() {
        let null = StagedFile::create(Path::new("/dev/null")).unwrap();
        null.commit().unwrap();
        let mut full = StagedFile::create(Path::new("/dev/full")).unwrap();
        let error = full.write_all(&[0; 4096]).unwrap_err();
        let message = full.write_error(error).to_string();
        assert!(
            message.starts_with("/dev/full: writing failed after 0 bytes: No space left"),
            "{message}"
        );
        assert!(
            message.ends_with("free some space or choose another place"),
            "{message}"
        );
        assert!(Path::new("/dev/full").exists());
    }

    #[test]
    fn places_that_cannot_be_written_are_refused_at_once() {
        let scratch = Folder::scratch();
        let message = |path: &Path| StagedFile::create(path).unwrap_err().to_string();
        assert!(message(&scratch.file("")).ends_with("is a directory; name a file in it"));
        assert!(message(&scratch.file("no/such/dir.y4m")).ends_with("create its directory first"));
        fs::write(scratch.file("file"), b"").unwrap();
        assert!(message(&scratch.file("file/in/file")).contains("Not a directory"));
        assert!(message(&scratch.file(&"a".repeat(256))).contains("File name too long"));
        // Not even root may create a file there.
        assert!(message(Path::new("/proc/out.y4m")).contains("/proc/out.y4m: cannot be created"));
    }
}
