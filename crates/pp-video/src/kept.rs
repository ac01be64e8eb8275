//! Outputs that were kept before they were finished: the whole frames in them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use pp_job::output::{OutputError, StagedFile, is_locked, kept_name};

use super::header::Header;
use super::y4m::{MAX_FRAME_LINE_BYTES, Reader};

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

/// Cuts what a job that ended early kept of `target` to whole frames, and says how many they are. A file without one is
/// removed. `None` where nothing was kept, or another job writes it.
///
/// # Errors
/// The file cannot be read or cut.
pub fn cut(target: &Path) -> io::Result<Option<u64>> {
    let Some(path) = kept_name(target).filter(|path| path.is_file()) else {
        return Ok(None);
    };
    let file = File::options().read(true).write(true).open(&path)?;
    if !is_locked(&file) {
        return Ok(None);
    }
    let (frames, end) = match Reader::open(&path) {
        Ok(reader) => whole_frames(&file, &reader.header, u64::MAX)?,
        // Killed before the header was written. What is no beginning of a video is not ours.
        Err(_) if file.metadata()?.len() == 0 => (0, 0),
        Err(_) => return Ok(None),
    };
    if frames == 0 {
        std::fs::remove_file(&path)?;
        return Ok(None);
    }
    file.set_len(end)?;
    Ok(Some(frames))
}

/// Opens what was kept of `target` to be written on behind the frames of `skip` frames of the input, of each of which
/// `per_frame` were made.
///
/// # Errors
/// It is not there, has another header, or fewer frames.
pub(crate) fn go_on(
    target: &Path,
    header: &Header,
    (skip, per_frame): (u64, u64),
) -> Result<StagedFile, OutputError> {
    let Some(path) = kept_name(target) else {
        return StagedFile::create(target);
    };
    let refuse = |why| OutputError::Kept(path.as_path().into(), why);
    let read = |source| OutputError::Create {
        path: path.as_path().into(),
        source,
    };
    if !path.exists() {
        return Err(refuse(
            "is not there, and --skip with --keep-partial goes on in it; leave --keep-partial out to write the frames \
             behind alone"
                .into(),
        ));
    }
    let there = Reader::open(&path).map_err(|error| refuse(error.to_string()))?;
    if there.header != *header {
        return Err(refuse(
            "has another header than this output; give the options of the job that wrote it".into(),
        ));
    }
    let file = File::open(&path).map_err(read)?;
    let wanted = skip.saturating_mul(per_frame);
    let (frames, bytes) = whole_frames(&file, header, wanted).map_err(read)?;
    if frames < wanted {
        let of_input = frames / per_frame;
        return Err(refuse(format!(
            "has {frames} whole frames, made of {of_input} of the input; --skip {of_input} goes on in it"
        )));
    }
    StagedFile::keep(target, bytes)
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
            assert_eq!(cut(&target).unwrap(), Some(3), "{behind:?}");
            assert_eq!(std::fs::read(&path).unwrap(), whole);
        }
        folder.write("out.y4m.part", b"YUV4MPEG2 W16 H16 Cmono\nFRAME\n");
        assert_eq!(cut(&target).unwrap(), None);
        assert!(!path.exists());
        folder.write("out.y4m.part", b"a text of somebody");
        assert_eq!(cut(&target).unwrap(), None);
        assert!(path.exists());
    }

    #[test]
    fn only_frames_that_are_there_are_gone_on_behind() {
        let folder = Folder::scratch();
        let target = folder.file("out.y4m");
        let header = Header::new(16, 16, Chroma::Mono).unwrap();
        let refusal = |header: &Header, skip| go_on(&target, header, skip).unwrap_err().to_string();
        assert!(refusal(&header, (1, 1)).contains("is not there"));
        kept(&folder, b"FRAME\nhalf");
        assert!(refusal(&header, (4, 1)).contains("--skip 3 goes on"));
        assert!(refusal(&header, (2, 2)).contains("has 3 whole frames, made of 1"));
        let other = Header::new(16, 32, Chroma::Mono).unwrap();
        assert!(refusal(&other, (1, 1)).contains("another header"));
        let file = go_on(&target, &header, (1, 2)).unwrap();
        assert_eq!(file.written(), header.line().len() as u64 + 1 + 2 * 262 + 3);
        file.commit().unwrap();
        assert_eq!(folder.names(), ["out.y4m"]);
    }
}
