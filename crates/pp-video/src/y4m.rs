//! Reading and writing YUV4MPEG2, strictly.
//!
//! Written here because the `y4m` crate reports a frame that is cut off as a plain end of file: a broken input would pass
//! for a shorter one. This reader knows the end of a file from a break in it, allocates nothing per frame, and bounds
//! every line and size before it acts on them.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::InputError;
use super::error::{At, HeaderFault};
use super::header::{Header, MAGIC, MAX_HEADER_BYTES};
use pp_job::output::Patient;
use pp_kernels::Bits;

const FRAME: &[u8] = b"FRAME";
/// The line in front of a frame without parameters.
const PLAIN: [u8; 6] = *b"FRAME\n";
/// Longest accepted line in front of a frame.
pub(crate) const MAX_FRAME_LINE_BYTES: usize = 256;
const BUFFER_BYTES: usize = 256 << 10;

/// A stream whose header was read and accepted.
pub struct Reader {
    input: BufReader<Box<dyn Read + Send>>,
    /// The name of the input, for messages.
    pub name: String,
    /// The header, as it was accepted.
    pub header: Header,
    /// Frames read whole so far.
    frame: u64,
    /// Bytes consumed so far.
    offset: u64,
    /// What stood behind `FRAME` in front of the frame read last.
    params: Vec<u8>,
    /// The input again, where it is a file of known length, and where in it this stream begins.
    file: Option<(Arc<File>, u64)>,
    /// How long that file was, from there.
    had: u64,
}

/// The plain frames of a file, found by their numbers: for threads that read at once.
#[derive(Clone)]
pub struct PlainFrames {
    file: Arc<File>,
    /// Where the marker of the first frame begins.
    start: u64,
    header: Header,
}

impl PlainFrames {
    /// Bytes from one frame to the next.
    fn stride(&self) -> u64 {
        (PLAIN.len() + self.header.frame_bytes()) as u64
    }

    /// Reads frame `number`; false where there is no such frame, it is cut off, it or one before it has parameters, or a sample
    /// is too large.
    pub(crate) fn read(&self, number: u64, frame: &mut [u8]) -> bool {
        let at = self.start + number * self.stride();
        let mut marker = [0; PLAIN.len()];
        self.file.read_exact_at(&mut marker, at).is_ok()
            && marker == PLAIN
            && self
                .file
                .read_exact_at(frame, at + PLAIN.len() as u64)
                .is_ok()
            && !has_too_large(&self.header, frame)
    }

    /// Says how many frames the file has room for; `None` where its length cannot be read.
    pub fn count(&self) -> Option<u64> {
        let bytes = self.file.metadata().ok()?.len().checked_sub(self.start)?;
        Some(bytes / self.stride())
    }
}

impl Reader {
    /// Opens a file, or standard input for `-`, and reads the header.
    ///
    /// # Errors
    /// The file cannot be read, or its header is not one of ours.
    pub fn open(path: &Path) -> Result<Self, InputError> {
        if path.as_os_str() == "-" {
            let name = String::from("standard input");
            // Past the lock and the buffer of `io::stdin`: the reader may move to its own thread.
            return match io::stdin().as_fd().try_clone_to_owned() {
                Ok(stdin) => Self::of(File::from(stdin), name),
                Err(source) => Err(InputError::Open { name, source }),
            };
        }
        let name = path.display().to_string();
        match File::open(path) {
            Ok(file) => Self::of(file, name),
            Err(source) => Err(InputError::Open { name, source }),
        }
    }

    /// Reads the header of a file or whatever else a descriptor stands for.
    pub(super) fn of(mut file: File, name: String) -> Result<Self, InputError> {
        let about = file.metadata().ok();
        if about.as_ref().is_some_and(|about| about.is_dir()) {
            return Err(InputError::IsDirectory(name));
        }
        // Standard input may be a file of which another program has read the beginning.
        let start = file.stream_position().ok();
        let about = about.filter(|about| about.is_file());
        let start = start.filter(|_| about.is_some());
        let file = Arc::new(file);
        let mut reader = Self::new(Patient(Arc::clone(&file)), name)?;
        if let (Some(start), Some(about)) = (start, about) {
            reader.had = about.len().saturating_sub(start);
            reader.file = Some((file, start));
        }
        Ok(reader)
    }

    /// Gives the frames by number, where the input is a file of which no frame was read yet.
    pub fn plain_frames(&self) -> Option<PlainFrames> {
        let (file, start) = self.file.as_ref()?;
        Some(PlainFrames {
            file: Arc::clone(file),
            start: start + self.offset,
            header: self.header.clone(),
        })
    }

    /// Goes on behind the first `count` of these frames, all of which are plain.
    ///
    /// # Errors
    /// The file cannot be read from there.
    pub(crate) fn skip(&mut self, frames: &PlainFrames, count: u64) -> Result<(), InputError> {
        let begin = self.file.as_ref().map_or(0, |(_, start)| *start);
        let at = frames.start + count * frames.stride();
        (self.frame, self.offset) = (count, at - begin);
        let mut file = Arc::clone(&frames.file);
        let sought = file.seek(SeekFrom::Start(at));
        sought.map_err(|source| self.failed(source))?;
        self.input = BufReader::with_capacity(BUFFER_BYTES, Box::new(file));
        Ok(())
    }

    /// Reads the header of any stream; `name` is what errors call it.
    pub(crate) fn new(input: impl Read + Send + 'static, name: String) -> Result<Self, InputError> {
        let input: Box<dyn Read + Send> = Box::new(input);
        let mut input = BufReader::with_capacity(BUFFER_BYTES, input);
        let mut line = Vec::new();
        let limit = MAX_HEADER_BYTES as u64 + 1;
        if let Err(source) = (&mut input).take(limit).read_until(b'\n', &mut line) {
            let (frame, offset) = (0, 0);
            let at = At {
                name,
                frame,
                offset,
            };
            return Err(InputError::Read { at, source });
        }
        if line.is_empty() {
            return Err(InputError::Empty(name));
        }
        if !line.starts_with(MAGIC) {
            return Err(InputError::Foreign(name, guess(&line)));
        }
        let offset = line.len() as u64;
        if line.pop() != Some(b'\n') {
            let what = if offset == limit {
                format!("its first line is longer than {MAX_HEADER_BYTES} bytes")
            } else {
                format!("the file ends inside it, after {offset} bytes")
            };
            return Err(InputError::Header(name, HeaderFault::Malformed(what)));
        }
        match Header::parse(&line) {
            Ok(header) => Ok(Self {
                input,
                name,
                header,
                frame: 0,
                offset,
                params: Vec::new(),
                file: None,
                had: 0,
            }),
            Err(fault) => Err(InputError::Header(name, fault)),
        }
    }

    /// Reads the next frame into `frame`, which must have [`Header::frame_bytes`] bytes. False at the end of the stream.
    ///
    /// # Errors
    /// Anything but a clean end after a whole frame. After an error the stream must not be read on.
    pub fn read_frame(&mut self, frame: &mut [u8]) -> Result<bool, InputError> {
        debug_assert_eq!(frame.len(), self.header.frame_bytes());
        if !self.read_marker()? {
            return match self.frame {
                0 => Err(InputError::NoFrames(self.name.clone())),
                _ if self.offset < self.had => Err(InputError::Shrunk {
                    at: self.at(),
                    had: self.had,
                }),
                _ => Ok(false),
            };
        }
        let mut have = 0;
        while have < frame.len() {
            match self.input.read(&mut frame[have..]) {
                Ok(0) => return Err(self.truncated(have, frame.len())),
                Ok(n) => {
                    have += n;
                    self.offset += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failed(e)),
            }
        }
        if has_too_large(&self.header, frame) {
            return Err(self.too_large(frame));
        }
        self.frame += 1;
        Ok(true)
    }

    /// What stood behind `FRAME` in front of the frame read last; empty for most.
    pub(crate) fn params(&self) -> &[u8] {
        &self.params
    }

    /// Reads the line `FRAME…`. False at the end of the stream.
    fn read_marker(&mut self) -> Result<bool, InputError> {
        let mut line = [0u8; MAX_FRAME_LINE_BYTES];
        for len in 0..line.len() {
            let Some(byte) = self.read_byte()? else {
                self.offset += len as u64;
                return match len {
                    0 => Ok(false),
                    _ => Err(self.truncated(0, self.header.frame_bytes())),
                };
            };
            line[len] = byte;
            // Judged at once: a reader that lost its place must not look for a newline in the middle of a picture.
            let fits = FRAME
                .get(len)
                .map_or(len > FRAME.len() || matches!(byte, b'\n' | b' '), |&b| {
                    b == byte
                });
            if !fits {
                return Err(self.no_marker(&line[..=len]));
            }
            if byte == b'\n' {
                self.offset += len as u64 + 1;
                self.params.clear();
                self.params.extend_from_slice(&line[FRAME.len()..len]);
                return Ok(true);
            }
        }
        Err(self.no_marker(&line))
    }

    fn read_byte(&mut self) -> Result<Option<u8>, InputError> {
        let byte = self.input.by_ref().bytes().next().transpose();
        byte.map_err(|e| self.failed(e))
    }

    fn at(&self) -> At {
        At {
            name: self.name.clone(),
            frame: self.frame,
            offset: self.offset,
        }
    }

    fn truncated(&self, have: usize, want: usize) -> InputError {
        let at = self.at();
        InputError::Truncated { at, have, want }
    }

    fn no_marker(&self, found: &[u8]) -> InputError {
        let found = found[..found.len().min(16)].escape_ascii();
        InputError::NoMarker {
            at: self.at(),
            found: format!("\"{found}\""),
        }
    }

    /// The first sample of the frame that was just read which the header's bits do not hold.
    fn too_large(&self, frame: &[u8]) -> InputError {
        let samples = frame.as_chunks().0.iter();
        let mut samples = samples.map(|two| u16::from_le_bytes(*two)).enumerate();
        let is_large = |(_, sample): &(usize, u16)| *sample > self.header.bits().peak();
        let (index, sample) = samples.find(is_large).unwrap_or_default();
        let mut at = self.at();
        at.offset -= (frame.len() - 2 * index) as u64;
        let (frames, mut rest, mut plane) = (self.header.frames(), index, 0);
        loop {
            let (width, height) = frames.plane_size(plane);
            let (width, height) = (width as usize, height as usize);
            if rest < width * height || plane == 2 {
                let (x, y) = (rest % width.max(1), rest / width.max(1));
                let place = format!("plane {plane}, column {x}, row {y}");
                return InputError::TooLarge { at, sample, place };
            }
            (rest, plane) = (rest - width * height, plane + 1);
        }
    }

    fn failed(&self, source: io::Error) -> InputError {
        let at = self.at();
        InputError::Read { at, source }
    }
}

/// Whether a frame has a sample that the header's bits do not hold.
fn has_too_large(header: &Header, frame: &[u8]) -> bool {
    let any = |bits: u16, two: &[u8; 2]| bits | u16::from_le_bytes(*two);
    header.bits() > Bits::Eight && frame.as_chunks().0.iter().fold(0, any) > header.bits().peak()
}

/// What a foreign file probably is, from its first bytes.
fn guess(start: &[u8]) -> &'static str {
    let at = |offset: usize, magic: &[u8]| {
        start
            .get(offset..)
            .is_some_and(|rest| rest.starts_with(magic))
    };
    match () {
        () if at(4, b"ftyp") || at(4, b"moov") => "an MP4 or QuickTime file",
        () if at(0, b"\x1a\x45\xdf\xa3") => "a Matroska or WebM file",
        () if at(0, b"RIFF") => "an AVI or WAV file",
        () if at(0, b"\x89PNG") || at(0, b"\xff\xd8\xff") || at(0, b"GIF8") => "a picture",
        () if at(0, b"DKIF") => "an IVF file",
        () if at(0, b"\x00\x00\x01\xba") || at(0, b"\x47") => "an MPEG stream",
        () if at(0, b"\x7fELF") => "a program",
        () => "something else",
    }
}

/// Writes the header of a stream.
pub(crate) fn write_header(out: &mut impl Write, header: &Header) -> io::Result<()> {
    out.write_all(header.line())?;
    out.write_all(b"\n")
}

/// What stood behind `FRAME` in front of some frames of a chunk: the number of the frame in the chunk, and the text.
pub type Params = Vec<(usize, Vec<u8>)>;

/// Whole frames, one after the other, as a file has them: each behind a line of its own.
pub(crate) struct Frames<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) frame_bytes: usize,
    pub(crate) params: &'a Params,
}

impl Frames<'_> {
    /// How many frames they are.
    pub(crate) fn count(&self) -> u64 {
        (self.bytes.len() / self.frame_bytes) as u64
    }

    /// Bytes in a file.
    pub(crate) fn file_bytes(&self) -> u64 {
        let lines = self.count() * PLAIN.len() as u64;
        let params: usize = self.params.iter().map(|(_, text)| text.len()).sum();
        self.bytes.len() as u64 + lines + params as u64
    }

    /// Writes them.
    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        for (k, frame) in self.bytes.chunks_exact(self.frame_bytes).enumerate() {
            match self.params.iter().find(|(at, _)| *at == k) {
                None => out.write_all(&PLAIN)?,
                Some((_, text)) => out.write_all(&[FRAME, text, b"\n"].concat())?,
            }
            out.write_all(frame)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
