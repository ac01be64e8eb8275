//! Where a path leads, and that no result of a command replaces another of its files.
//!
//! Two paths are compared by what they lead to: device and inode of what exists, device and inode of the folder and the
//! name of what does not. Spelling, symbolic links and hard links make no difference.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::stdout::stdout;
use crate::error::Error;

/// Links that lead to each other are followed no further.
const MAX_LINKS: usize = 40;
/// Device number of `/dev/null`, which any number of results may go to.
const NULL: (u32, u32) = (1, 3);

/// Says whether this path is standard output, as far as its name says.
pub fn is_stdout(path: &Path) -> bool {
    ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"]
        .iter()
        .any(|name| path == Path::new(name))
}

/// Says whether this path leads through a descriptor of a process, as `/dev/fd/5` and `/dev/stderr` do.
pub(super) fn is_descriptor(path: &Path) -> bool {
    behind_links(path).any(|path| {
        let folder = path.parent().and_then(|to| fs::canonicalize(to).ok());
        folder.is_some_and(|folder| folder.starts_with("/proc") && folder.ends_with("fd"))
    })
}

/// The path behind all symbolic links, also where the last one leads to a file that does not exist yet.
pub(super) fn resolve(path: &Path) -> PathBuf {
    let mut last = path.to_path_buf();
    for path in behind_links(path) {
        if let Ok(real) = fs::canonicalize(&path) {
            return real;
        }
        last = path;
        if fs::metadata(&last).is_ok() {
            // A descriptor of a process: its link leads there and names no file.
            break;
        }
    }
    last
}

/// The path, and where its link leads, and the link there, and so on.
fn behind_links(path: &Path) -> impl Iterator<Item = PathBuf> {
    let follow = |path: &PathBuf| {
        let target = fs::read_link(path).ok()?;
        Some(path.parent().unwrap_or(Path::new("")).join(target))
    };
    std::iter::successors(Some(path.to_path_buf()), follow).take(MAX_LINKS + 1)
}

/// What a path leads to.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Device and inode.
    There(u64, u64),
    /// Device and inode of the folder, and the name in it.
    ToBe(u64, u64, OsString),
}

impl Place {
    fn of(about: &Metadata) -> Self {
        Self::There(about.dev(), about.ino())
    }

    /// Where a result goes; `None` where it disturbs no other file.
    fn of_result(path: &Path) -> Option<Self> {
        let about = if is_stdout(path) {
            metadata_of(stdout())
        } else {
            fs::metadata(path).ok()
        };
        if let Some(about) = about {
            let device = (
                rustix::fs::major(about.rdev()),
                rustix::fs::minor(about.rdev()),
            );
            let is_null = about.file_type().is_char_device() && device == NULL;
            return (!is_null).then(|| Self::of(&about));
        }
        let path = resolve(path);
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        let folder = fs::metadata(folder.unwrap_or(Path::new("."))).ok()?;
        Some(Self::ToBe(
            folder.dev(),
            folder.ino(),
            path.file_name()?.into(),
        ))
    }

    /// What is read. Only what holds its bytes can be lost: a terminal or a socket may be input and output at once.
    fn of_source(path: &Path) -> Option<Self> {
        let about = if path == Path::new("-") {
            metadata_of(std::io::stdin())?
        } else {
            fs::metadata(path).ok()?
        };
        let kind = about.file_type();
        (kind.is_file() || kind.is_block_device()).then(|| Self::of(&about))
    }
}

fn metadata_of(stream: impl AsFd) -> Option<Metadata> {
    let copy = stream.as_fd().try_clone_to_owned().ok()?;
    File::from(copy).metadata().ok()
}

/// Refuses a result that would replace a file that the command reads, or another result. Both lists hold flags and paths.
///
/// # Errors
/// [`Error::Usage`], with both flags.
pub fn one_file_each(
    sources: &[(&str, Option<&Path>)],
    results: &[(&str, Option<&Path>)],
) -> Result<(), Error> {
    let mut taken: Vec<(&str, Place)> = Vec::new();
    for (flag, path) in sources {
        let place = path.and_then(Place::of_source);
        taken.extend(place.map(|place| (*flag, place)));
    }
    for (flag, path) in results {
        let Some(place) = path.and_then(Place::of_result) else {
            continue;
        };
        if let Some((earlier, _)) = taken.iter().find(|(_, other)| *other == place) {
            return Err(Error::Usage(format!(
                "{earlier} and {flag} name the same place; give each its own file"
            )));
        }
        taken.push((flag, place));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use pp_testing::Folder;

    fn clash(source: &Path, results: &[&Path]) -> Option<String> {
        let results: Vec<_> = results.iter().map(|path| ("--out", Some(*path))).collect();
        let failure = one_file_each(&[("--in", Some(source))], &results).err()?;
        Some(failure.to_string())
    }

    #[test]
    fn spellings_and_links_of_one_file_are_one_place() {
        let scratch = Folder::scratch();
        let there = scratch.file("there");
        fs::write(&there, b"").unwrap();
        fs::create_dir(scratch.file("folder")).unwrap();
        symlink("there", scratch.file("soft")).unwrap();
        fs::hard_link(&there, scratch.file("hard")).unwrap();
        symlink("new", scratch.file("dangling")).unwrap();
        symlink("dangling", scratch.file("chain")).unwrap();
        let none = scratch.file("none");
        for name in ["there", "folder/../there", "./there", "soft", "hard"] {
            let path = scratch.file(name);
            let said = clash(&there, &[&path]).unwrap();
            assert!(
                said.contains("--in and --out name the same place"),
                "{said}"
            );
            assert!(clash(&none, &[&there, &path]).is_some(), "{name}");
        }
        for name in ["new", "folder/../new", "dangling", "chain"] {
            let new = scratch.file("new");
            assert!(
                clash(&there, &[&new, &scratch.file(name)]).is_some(),
                "{name}"
            );
        }
        assert!(clash(&there, &[&none, &scratch.file("new")]).is_none());
    }

    #[test]
    fn what_holds_no_bytes_may_be_read_and_written_but_two_results_do_not_mix_in_it() {
        let scratch = Folder::scratch();
        let (fifo, null) = (scratch.fifo("fifo"), Path::new("/dev/null"));
        assert!(clash(&fifo, &[&fifo]).is_none());
        assert!(clash(null, &[null, null]).is_none());
        assert!(clash(null, &[&fifo, &fifo]).is_some());
        assert!(clash(null, &[Path::new("-"), Path::new("/dev/stdout")]).is_some());
    }

    #[test]
    fn links_in_a_circle_end() {
        let scratch = Folder::scratch();
        let path = scratch.file("circle");
        symlink("circle", &path).unwrap();
        assert_eq!(resolve(&path), path);
    }
}
