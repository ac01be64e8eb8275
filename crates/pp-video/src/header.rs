//! The first line of a YUV4MPEG2 stream, checked once: after that sizes cannot be absurd.
//!
//! Source: the man page yuv4mpeg(5) of mjpegtools, and what ffmpeg writes.

use pp_kernels::{Bits, Chroma, FrameGeometry};

use super::error::HeaderFault;

/// Longest accepted stream header, far above what any writer makes.
pub const MAX_HEADER_BYTES: usize = 1024;
/// Largest accepted width and height.
pub(crate) const MAX_SIDE: u32 = 16_384;
pub(crate) const MAGIC: &[u8] = b"YUV4MPEG2";

/// A header whose sizes were checked. The line is kept as it came, so that rate, interlacing, aspect, siting and comments
/// pass through to the output untouched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    line: Vec<u8>,
    width: u32,
    height: u32,
    chroma: Chroma,
    bits: Bits,
    is_interlaced: bool,
    /// Frames, in so many seconds.
    rate: Option<(u32, u32)>,
}

impl Header {
    /// A header of our own, at 25 frames a second.
    #[cfg(test)]
    pub(crate) fn new(width: u32, height: u32, chroma: Chroma) -> Result<Self, HeaderFault> {
        let tag = tag_of(chroma, Bits::Eight);
        Self::parse(format!("YUV4MPEG2 W{width} H{height} F25:1 Ip A1:1 C{tag}").as_bytes())
    }

    /// Makes the header of the frames that a sink makes of frames of this header. Where they are alike it stays as it is.
    ///
    /// # Errors
    /// A side is out of range.
    pub fn of_frames(&self, frames: FrameGeometry) -> Result<Self, HeaderFault> {
        let FrameGeometry {
            width,
            height,
            chroma,
            bits,
            frames_per_frame,
        } = frames;
        if frames == self.frames() {
            return Ok(self.clone());
        }
        let is_same_format = (chroma, bits) == (self.chroma, self.bits);
        let scaled = |side: u32, by: u32| u64::from(side) * u64::from(by);
        let has_same_pixels = scaled(width, self.height) == scaled(height, self.width);
        let text = String::from_utf8_lossy(&self.line);
        let words = text.split(' ').filter(|word| !word.is_empty()).skip(1);
        let mut line = format!("YUV4MPEG2 W{width} H{height}");
        for word in words {
            let of_chroma = word.starts_with('C') || word.starts_with("XYSCSS=");
            line.push(' ');
            match word.chars().next() {
                Some('W' | 'H') => line.truncate(line.len() - 1),
                Some('F') => line.push_str(&rate(word, frames_per_frame)),
                // It is not known any more.
                Some('A') if !has_same_pixels => line.push_str("A0:0"),
                _ if of_chroma && !is_same_format => line.truncate(line.len() - 1),
                _ => line.push_str(word),
            }
        }
        if !is_same_format {
            line.push_str(&format!(" C{}", tag_of(chroma, bits)));
        }
        Self::parse(line.as_bytes())
    }

    /// Checks a header line, given without its newline.
    ///
    /// # Errors
    /// The line is malformed, or says of frames that are not supported.
    pub fn parse(line: &[u8]) -> Result<Self, HeaderFault> {
        let text = std::str::from_utf8(line)
            .map_err(|_| HeaderFault::Malformed("it is not text".into()))?;
        let mut words = text.split(' ').filter(|word| !word.is_empty());
        if words.next().map(str::as_bytes) != Some(MAGIC) {
            return Err(HeaderFault::Malformed(
                "it does not begin with YUV4MPEG2".into(),
            ));
        }
        let (mut width, mut height) = (None, None);
        let (mut chroma, mut bits) = (Chroma::C420, Bits::Eight);
        let (mut is_interlaced, mut rate) = (false, None);
        for word in words {
            let mut rest = word.chars();
            let tag = rest.next();
            let value = rest.as_str();
            match tag {
                Some('W') => width = Some(side("width", value)?),
                Some('H') => height = Some(side("height", value)?),
                Some('C') => (chroma, bits) = colour_space(value)?,
                Some('I') => is_interlaced = interlacing(value)?,
                Some('F') => rate = known_rate(value),
                _ => {}
            }
        }
        Ok(Self {
            line: line.to_vec(),
            width: width.ok_or_else(|| HeaderFault::Malformed("no width (W)".into()))?,
            height: height.ok_or_else(|| HeaderFault::Malformed("no height (H)".into()))?,
            chroma,
            bits,
            is_interlaced,
            rate,
        })
    }

    /// Gives the width of a frame in samples.
    #[must_use]
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Gives the height of a frame in samples.
    #[must_use]
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Gives the layout of the chroma planes.
    #[must_use]
    pub fn chroma(&self) -> Chroma {
        self.chroma
    }

    /// Gives the bits of a sample. One of more than 8 is two bytes, the lower one first.
    #[must_use]
    pub fn bits(&self) -> Bits {
        self.bits
    }

    /// Describes the frames, each of which is given once.
    #[must_use]
    pub fn frames(&self) -> FrameGeometry {
        FrameGeometry {
            width: self.width,
            height: self.height,
            chroma: self.chroma,
            bits: self.bits,
            frames_per_frame: 1,
        }
    }

    /// Says whether each frame is two fields of different times.
    #[must_use]
    pub fn is_interlaced(&self) -> bool {
        self.is_interlaced
    }

    /// Gives the nanoseconds from frame 0 to frame `number` at the rate of the header; none where it says no rate.
    #[must_use]
    pub fn due_ns(&self, number: u64) -> Option<u64> {
        let (frames, seconds) = self.rate?;
        let ns = u128::from(number) * u128::from(seconds) * 1_000_000_000 / u128::from(frames);
        Some(ns.try_into().unwrap_or(u64::MAX))
    }

    /// Gives the header as it came, without its newline.
    #[must_use]
    pub fn line(&self) -> &[u8] {
        &self.line
    }

    /// Bytes of the luma plane, which comes first in a frame.
    pub(crate) fn luma_bytes(&self) -> usize {
        self.width as usize * self.height as usize * self.bits.bytes()
    }

    /// Gives the bytes of a whole frame: luma, then chroma if there is any. Odd sizes round chroma up.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        self.frames().frame_bytes()
    }
}

/// What ffmpeg writes behind `C`.
fn tag_of(chroma: Chroma, bits: Bits) -> &'static str {
    match (chroma, bits) {
        (Chroma::Mono, Bits::Eight) => "mono",
        (Chroma::C420, Bits::Eight) => "420jpeg",
        (Chroma::C422, Bits::Eight) => "422",
        (Chroma::C444, Bits::Eight) => "444",
        (Chroma::Mono, Bits::Ten) => "mono10",
        (Chroma::C420, Bits::Ten) => "420p10 XYSCSS=420P10",
        (Chroma::C422, Bits::Ten) => "422p10 XYSCSS=422P10",
        (Chroma::C444, Bits::Ten) => "444p10 XYSCSS=444P10",
    }
}

/// So many times the rate of this word, such as `F30000:1001`. One that cannot be read stays as it is.
fn rate(word: &str, times: u32) -> String {
    let raised = two_numbers(&word[1..])
        .and_then(|(frames, seconds)| Some(format!("F{}:{seconds}", frames.checked_mul(times)?)));
    raised.unwrap_or_else(|| word.to_owned())
}

/// The rate of a value such as `30000:1001`; none of `0:0`, which says that it is not known.
fn known_rate(value: &str) -> Option<(u32, u32)> {
    two_numbers(value).filter(|(frames, seconds)| *frames > 0 && *seconds > 0)
}

fn two_numbers(value: &str) -> Option<(u32, u32)> {
    let (first, second) = value.split_once(':')?;
    Some((first.parse().ok()?, second.parse().ok()?))
}

fn side(name: &str, value: &str) -> Result<u32, HeaderFault> {
    match value.parse::<u32>() {
        Ok(n) if (1..=MAX_SIDE).contains(&n) => Ok(n),
        _ => Err(HeaderFault::Malformed(format!(
            "{name} {value:?} is not a number from 1 to {MAX_SIDE}"
        ))),
    }
}

/// Says whether frames are two fields. What is not known (`I?`) counts as progressive.
fn interlacing(value: &str) -> Result<bool, HeaderFault> {
    match value {
        "p" | "?" => Ok(false),
        "t" | "b" => Ok(true),
        "m" => Err(HeaderFault::Mixed),
        other => Err(HeaderFault::Malformed(format!(
            "interlacing {:?} is none of Ip, It, Ib and I?",
            format!("I{other}")
        ))),
    }
}

fn colour_space(value: &str) -> Result<(Chroma, Bits), HeaderFault> {
    let of_depth = |chroma, depth: &str| match depth {
        "10" => Some(Ok((chroma, Bits::Ten))),
        "9" | "12" | "14" | "16" => Some(Err(HeaderFault::Depth {
            tag: value.into(),
            format: Bits::Ten.ffmpeg_name(chroma),
        })),
        _ => None,
    };
    let deep = [
        ("420p", Chroma::C420),
        ("422p", Chroma::C422),
        ("444p", Chroma::C444),
        ("mono", Chroma::Mono),
    ]
    .into_iter()
    .find_map(|(tag, chroma)| of_depth(chroma, value.strip_prefix(tag)?));
    match value {
        "420" | "420jpeg" | "420mpeg2" | "420paldv" => Ok((Chroma::C420, Bits::Eight)),
        "422" => Ok((Chroma::C422, Bits::Eight)),
        "444" => Ok((Chroma::C444, Bits::Eight)),
        "mono" => Ok((Chroma::Mono, Bits::Eight)),
        other => deep.unwrap_or_else(|| {
            Err(HeaderFault::Unsupported(format!(
                "colour space C{other} (supported are 420, 422, 444 and mono, of 8 and 10 bits)"
            )))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_odd_pictures_round_chroma_up() {
        let bytes = |chroma| Header::new(17, 33, chroma).unwrap().frame_bytes();
        assert_eq!(bytes(Chroma::Mono), 561);
        assert_eq!(bytes(Chroma::C420), 561 + 2 * 9 * 17);
        assert_eq!(bytes(Chroma::C422), 561 + 2 * 9 * 33);
        assert_eq!(bytes(Chroma::C444), 3 * 561);
    }

    #[test]
    fn every_supported_tag_is_read_and_the_line_is_kept() {
        let line = b"YUV4MPEG2 W352 H288 F30000:1001 It A128:117 C420mpeg2 XYSCSS=420MPEG2 XCOLORRANGE=LIMITED";
        let header = Header::parse(line).unwrap();
        assert_eq!((header.width(), header.height()), (352, 288));
        assert_eq!(header.chroma(), Chroma::C420);
        assert_eq!(header.line(), line);
        for (tag, chroma) in [
            ("", Chroma::C420),
            ("C420", Chroma::C420),
            ("C420jpeg", Chroma::C420),
            ("C420paldv", Chroma::C420),
            ("C422", Chroma::C422),
            ("C444", Chroma::C444),
            ("Cmono", Chroma::Mono),
        ] {
            let header = Header::parse(format!("YUV4MPEG2 W2 H2 {tag}").as_bytes()).unwrap();
            assert_eq!(header.chroma(), chroma, "{tag}");
            assert_eq!(header.bits(), Bits::Eight);
        }
    }

    #[test]
    fn samples_of_10_bits_are_two_bytes() {
        // The lines of ffmpeg 7.1.
        for (tags, chroma, samples) in [
            ("C420p10 XYSCSS=420P10", Chroma::C420, 15 + 2 * 6),
            ("C422p10 XYSCSS=422P10", Chroma::C422, 15 + 2 * 10),
            ("C444p10 XYSCSS=444P10", Chroma::C444, 3 * 15),
            ("Cmono10", Chroma::Mono, 15),
        ] {
            let line = format!("YUV4MPEG2 W3 H5 F25:1 Ip A0:0 {tags} XCOLORRANGE=LIMITED");
            let header = Header::parse(line.as_bytes()).unwrap();
            assert_eq!((header.chroma(), header.bits()), (chroma, Bits::Ten));
            assert_eq!(header.frame_bytes(), 2 * samples, "{tags}");
            assert_eq!(header.luma_bytes(), 30);
        }
    }

    #[test]
    fn a_frame_is_due_at_the_rate_of_the_header() {
        let due = |rate: &str, number| {
            let line = format!("YUV4MPEG2 W2 H2 {rate}");
            Header::parse(line.as_bytes()).unwrap().due_ns(number)
        };
        assert_eq!(due("F25:1", 3), Some(120_000_000));
        assert_eq!(due("F30000:1001", 30_000), Some(1_001_000_000_000));
        assert_eq!(due("F1:4294967295", u64::MAX), Some(u64::MAX));
        for unknown in ["", "F0:0", "F25:0", "F0:1", "F25", "F-1:2"] {
            assert_eq!(due(unknown, 3), None, "{unknown}");
        }
    }

    #[test]
    fn frames_of_a_sink_change_size_rate_and_chroma_and_nothing_else() {
        let frames = |width, height, chroma, frames_per_frame| FrameGeometry {
            width,
            height,
            chroma,
            bits: Bits::Eight,
            frames_per_frame,
        };
        let ten = FrameGeometry {
            bits: Bits::Ten,
            ..frames(64, 48, Chroma::C420, 1)
        };
        let all = "YUV4MPEG2  W64 H48 F30000:1001 It A128:117 C420mpeg2 XYSCSS=420MPEG2 Xa";
        for (line, frames, expected) in [
            (all, frames(64, 48, Chroma::C420, 1), all),
            (
                all,
                frames(128, 96, Chroma::C420, 2),
                "YUV4MPEG2 W128 H96 F60000:1001 It A128:117 C420mpeg2 XYSCSS=420MPEG2 Xa",
            ),
            (
                all,
                frames(64, 96, Chroma::C444, 1),
                "YUV4MPEG2 W64 H96 F30000:1001 It A0:0 Xa C444",
            ),
            (
                all,
                ten,
                "YUV4MPEG2 W64 H48 F30000:1001 It A128:117 Xa C420p10 XYSCSS=420P10",
            ),
            (
                "YUV4MPEG2 W64 H48 C420p10 XYSCSS=420P10",
                ten,
                "YUV4MPEG2 W64 H48 C420p10 XYSCSS=420P10",
            ),
            (
                "YUV4MPEG2 W64 H48 C420p10 XYSCSS=420P10 Xa",
                frames(64, 48, Chroma::C420, 1),
                "YUV4MPEG2 W64 H48 Xa C420jpeg",
            ),
            (
                "YUV4MPEG2 H48 W64 F4000000000:1",
                frames(64, 48, Chroma::Mono, 3),
                "YUV4MPEG2 W64 H48 F4000000000:1 Cmono",
            ),
        ] {
            let made = Header::parse(line.as_bytes()).unwrap().of_frames(frames);
            let made = made.unwrap();
            assert_eq!(made.line(), expected.as_bytes());
            let once = FrameGeometry {
                frames_per_frame: 1,
                ..frames
            };
            assert_eq!(made.frames(), once);
        }
        let header = Header::parse(all.as_bytes()).unwrap();
        assert!(
            header
                .of_frames(frames(20_000, 48, Chroma::C420, 1))
                .is_err()
        );
    }

    #[test]
    fn absurd_and_missing_values_are_refused() {
        for line in [
            "YUV4MPEG2 W0 H2",
            "YUV4MPEG2 W2 H16385",
            "YUV4MPEG2 W-2 H2",
            "YUV4MPEG2 W99999999999 H2",
            "YUV4MPEG2 W2",
            "YUV4MPEG2 H2",
            "YUV4MPEG2",
            "YUV4MPEG W2 H2",
            "YUV4MPEG2 W H2",
            "YUV4MPEG2 W2 H2 Iz",
            "YUV4MPEG2 W2 H2 I",
            "YUV4MPEG2 W2 H2 Itb",
        ] {
            assert!(
                matches!(
                    Header::parse(line.as_bytes()),
                    Err(HeaderFault::Malformed(_))
                ),
                "{line}"
            );
        }
    }

    #[test]
    fn fields_are_told_from_whole_pictures() {
        for (tag, is_interlaced) in [
            ("", false),
            ("Ip", false),
            ("I?", false),
            ("It", true),
            ("Ib", true),
        ] {
            let header = Header::parse(format!("YUV4MPEG2 W2 H2 {tag}").as_bytes()).unwrap();
            assert_eq!(header.is_interlaced(), is_interlaced, "{tag}");
        }
        let mixed = Header::parse(b"YUV4MPEG2 W2 H2 Im").unwrap_err();
        assert_eq!(mixed, HeaderFault::Mixed);
    }

    #[test]
    fn depth_alpha_and_other_subsampling_are_named() {
        for (tag, format) in [
            ("C420p12", "yuv420p10le"),
            ("C422p16", "yuv422p10le"),
            ("C444p9", "yuv444p10le"),
            ("Cmono16", "gray10le"),
        ] {
            let fault = Header::parse(format!("YUV4MPEG2 W2 H2 {tag}").as_bytes()).unwrap_err();
            let text = fault.to_string();
            let convert = format!("ffmpeg -i IN -pix_fmt {format} -strict -1 OUT.y4m");
            assert!(text.contains(tag) && text.contains(&convert), "{text}");
        }
        for tag in ["C420p11", "C444alpha", "C411", "Cmono8", "C"] {
            let fault = Header::parse(format!("YUV4MPEG2 W2 H2 {tag}").as_bytes()).unwrap_err();
            let HeaderFault::Unsupported(what) = fault else {
                panic!("{tag}: {fault:?}")
            };
            assert!(what.contains(tag), "{what}");
        }
    }
}
