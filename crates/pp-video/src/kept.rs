//! Outputs that were kept before they were finished: the whole frames in them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pp_job::output::{OutputError, StagedFile, is_locked, kept_name};

use super::header::Header;
use super::origin::Origin;
use super::y4m::{MAX_FRAME_LINE_BYTES, Reader};

/// An output that is kept also where it is not committed, under [`pp_job::output::kept_name`].
#[derive(Clone, Debug)]
pub struct Keep {
    /// Frames of the input whose output is there already, and is gone on behind; 0 where the file is new.
    pub skip: u64,
    /// Frames that are made of one of the input.
    pub per_frame: u64,
    /// What decides its bytes; stands beside it.
    pub origin: Origin,
}

/// Counts whole frames behind the header, `most` at most, and says where the last of them ends.
fn whole_frames(file: &File, header: &Header, most: u64) -> io::Result<(u64, u64)> {
    let length = file.metadata()?.len();
    let (mut frames, mut end) = (0, header.line().len() as u64 + 1);
    let mut line = [0; MAX_FRAME_LINE_BYTES];
    while frames < most {
        let have = file.read_at(&mut line, end)?;
        let Some(marker) = line[..have].iter().position(|byte| *byte == b'\n') else {
            break;
        };
        let next = end + marker as u64 + 1 + header.frame_bytes() as u64;
        if !line.starts_with(b"FRAME") || next > length {
            break;
        }
        (frames, end) = (frames + 1, next);
    }
    Ok((frames, end))
}

/// The name of the count of frames that are made of one of the input, in a record.
const PER_FRAME: &str = "frames_per_frame";

/// What decided the bytes of a kept output: a file beside it.
#[derive(Debug)]
pub(crate) struct Record {
    path: PathBuf,
    origin: Origin,
    /// What is there already, where the output is gone on in.
    before: Option<Origin>,
    is_done: bool,
}

impl Record {
    /// Beside the file of this name.
    fn name(kept: &Path) -> PathBuf {
        let mut name = kept.as_os_str().to_owned();
        name.push(".json");
        name.into()
    }

    fn read(kept: &Path) -> io::Result<Origin> {
        Ok(serde_json::from_slice(&std::fs::read(Self::name(kept))?)?)
    }

    /// Compares the input with that of before, or writes the record. Once; whatever is called behind does nothing.
    pub(crate) fn of_input(&mut self, digest: u64) -> Result<(), OutputError> {
        if std::mem::replace(&mut self.is_done, true) {
            return Ok(());
        }
        let origin = self.origin.clone().of_input(digest);
        match &self.before {
            Some(before) => check(&self.path, &origin, before),
            None => {
                let text = serde_json::to_vec_pretty(&origin).unwrap_or_default();
                let path = Self::name(&self.path);
                let written = std::fs::write(&path, text);
                written.map_err(|source| OutputError::Create {
                    path: path.as_path().into(),
                    source,
                })
            }
        }
    }

    /// The output is complete.
    pub(crate) fn remove(self) {
        // One that is left over is written anew.
        let _ = std::fs::remove_file(Self::name(&self.path));
    }
}

/// Refuses to go on in a file that was made in another way.
fn check(path: &Path, origin: &Origin, before: &Origin) -> Result<(), OutputError> {
    let refuse = |what| {
        let why = format!(
            "{what}, so other bytes would follow; give the input and the options of the job that wrote it, or remove it"
        );
        Err(OutputError::Kept(path.into(), why))
    };
    origin.differs(before).map_or(Ok(()), refuse)
}

/// Cuts what a job that ended early kept of `target` to whole frames, and to those of whole frames of the input; says how many
/// they are, and how many of one of the input. A file without one is removed. `None` where nothing was kept, or another job
/// writes it.
///
/// # Errors
/// The file cannot be read or cut.
pub fn cut(target: &Path) -> io::Result<Option<(u64, u64)>> {
    let Some(path) = kept_name(target).filter(|path| path.is_file()) else {
        return Ok(None);
    };
    let file = File::options().read(true).write(true).open(&path)?;
    if !is_locked(&file) {
        return Ok(None);
    }
    let per_frame = Record::read(&path).ok();
    let per_frame = per_frame.and_then(|record| record.get(PER_FRAME)?.parse().ok());
    let per_frame = per_frame.filter(|count| *count > 0).unwrap_or(1);
    let (frames, end) = match Reader::open(&path) {
        Ok(reader) => {
            let (all, _) = whole_frames(&file, &reader.header, u64::MAX)?;
            whole_frames(&file, &reader.header, all - all % per_frame)?
        }
        // Killed before the header was written. What is no beginning of a video is not ours.
        Err(_) if file.metadata()?.len() == 0 => (0, 0),
        Err(_) => return Ok(None),
    };
    if frames == 0 {
        std::fs::remove_file(&path)?;
        let _ = std::fs::remove_file(Record::name(&path));
        return Ok(None);
    }
    file.set_len(end)?;
    Ok(Some((frames, per_frame)))
}

/// Opens an output that is kept: a new one, or what was kept of `target`, to be written on behind the frames of
/// [`Keep::skip`] frames of the input. The record is that of a regular file.
///
/// # Errors
/// One is there that should not be. Or it is not there, has another header, was made in another way, or has fewer frames.
pub(crate) fn open(
    target: &Path,
    header: &Header,
    keep: Keep,
) -> Result<(StagedFile, Option<Record>), OutputError> {
    let Some(path) = kept_name(target) else {
        return Ok((StagedFile::create(target)?, None));
    };
    let (skip, per_frame) = (keep.skip, keep.per_frame);
    let origin = keep.origin.set(PER_FRAME, per_frame);
    let (file, before) = match skip {
        0 => (StagedFile::keep(target, 0)?, None),
        _ => {
            let (bytes, before) = go_on(&path, header, (skip, per_frame), &origin)?;
            (StagedFile::keep(target, bytes)?, Some(before))
        }
    };
    let record = Record {
        path,
        origin,
        before,
        is_done: false,
    };
    Ok((file, Some(record)))
}

/// Where in the file the job goes on, and what decided the bytes before.
fn go_on(
    path: &Path,
    header: &Header,
    (skip, per_frame): (u64, u64),
    origin: &Origin,
) -> Result<(u64, Origin), OutputError> {
    let refuse = |why| OutputError::Kept(path.into(), why);
    let read = |source| OutputError::Create {
        path: path.into(),
        source,
    };
    if !path.exists() {
        return Err(refuse(
            "is not there, and --skip with --keep-partial goes on in it; leave --keep-partial out to write the frames \
             behind alone"
                .into(),
        ));
    }
    let before = Record::read(path).map_err(|error| {
        let record = Record::name(path);
        refuse(format!(
            "how it was made is not known: {}: {error}; put that file back, or remove this one",
            record.display()
        ))
    })?;
    check(path, origin, &before)?;
    let there = Reader::open(path).map_err(|error| refuse(error.to_string()))?;
    if there.header != *header {
        return Err(refuse(
            "has another header than this output; give the options of the job that wrote it".into(),
        ));
    }
    let file = File::open(path).map_err(read)?;
    let wanted = skip.saturating_mul(per_frame);
    let (frames, bytes) = whole_frames(&file, header, wanted).map_err(read)?;
    if frames < wanted {
        let of_input = frames / per_frame;
        return Err(refuse(format!(
            "has {frames} whole frames, made of {of_input} of the input; --skip {of_input} goes on in it"
        )));
    }
    Ok((bytes, before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::y4m::{Frames, write_header};
    use pp_kernels::Chroma;
    use pp_testing::Folder;

    /// A kept file of three frames, the second with parameters, and these bytes behind them.
    fn kept(folder: &Folder, behind: &[u8]) -> (Header, Vec<u8>) {
        let header = Header::new(16, 16, Chroma::Mono).unwrap();
        let mut bytes = Vec::new();
        write_header(&mut bytes, &header).unwrap();
        let frames = Frames {
            bytes: &[b'\n'; 3 * 256],
            frame_bytes: 256,
            params: &vec![(1, b" Xa".to_vec())],
        };
        frames.write(&mut bytes).unwrap();
        folder.write("out.y4m.part", &[&bytes, behind].concat());
        (header, bytes)
    }

    #[test]
    fn what_is_kept_is_cut_to_whole_frames() {
        let folder = Folder::scratch();
        let target = folder.file("out.y4m");
        let path = folder.file("out.y4m.part");
        assert_eq!(cut(&target).unwrap(), None);
        for behind in [&b""[..], b"FR", b"FRAME\n\n\n", b"FRAME"] {
            let (_, whole) = kept(&folder, behind);
            assert_eq!(cut(&target).unwrap(), Some((3, 1)), "{behind:?}");
            assert_eq!(std::fs::read(&path).unwrap(), whole);
        }
        folder.write("out.y4m.part", b"YUV4MPEG2 W16 H16 Cmono\nFRAME\n");
        assert_eq!(cut(&target).unwrap(), None);
        assert!(!path.exists());
        folder.write("out.y4m.part", b"a text of somebody");
        assert_eq!(cut(&target).unwrap(), None);
        assert!(path.exists());
    }

    fn keep(skip: u64, per_frame: u64, seed: u32) -> Keep {
        Keep {
            skip,
            per_frame,
            origin: Origin::default().set("seed", seed),
        }
    }

    #[test]
    fn only_frames_that_are_there_and_were_made_alike_are_gone_on_behind() {
        let folder = Folder::scratch();
        let target = folder.file("out.y4m");
        let header = Header::new(16, 16, Chroma::Mono).unwrap();
        let refusal = |header: &Header, keep| open(&target, header, keep).unwrap_err().to_string();
        assert!(refusal(&header, keep(1, 2, 1)).contains("is not there"));
        let (file, record) = open(&target, &header, keep(0, 2, 1)).unwrap();
        kept(&folder, b"FRAME\nhalf");
        assert!(refusal(&header, keep(1, 2, 1)).contains("how it was made is not known"));
        record.unwrap().of_input(7).unwrap();
        drop(file);
        // The third is the first of two that are made of one.
        assert_eq!(cut(&target).unwrap(), Some((2, 2)));
        kept(&folder, b"FRAME\nhalf");
        let few = "has 3 whole frames, made of 1 of the input; --skip 1 goes on";
        assert!(refusal(&header, keep(2, 2, 1)).contains(few));
        assert!(refusal(&header, keep(1, 2, 8)).contains("seed was 1 and is 8"));
        assert!(refusal(&header, keep(1, 1, 1)).contains("frames_per_frame was 2 and is 1"));
        let other = Header::new(16, 32, Chroma::Mono).unwrap();
        assert!(refusal(&other, keep(1, 2, 1)).contains("another header"));
        let (file, record) = open(&target, &header, keep(1, 2, 1)).unwrap();
        assert_eq!(file.written(), header.line().len() as u64 + 1 + 2 * 262 + 3);
        let mut record = record.unwrap();
        let other = record.of_input(8).unwrap_err().to_string();
        assert!(other.contains("other frames"), "{other}");
        file.commit().unwrap();
        record.remove();
        assert_eq!(folder.names(), ["out.y4m"]);
    }
}
