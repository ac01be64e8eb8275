use super::super::testing::write_frame;
use super::*;
use pp_kernels::Chroma;
use pp_testing::Folder;
use std::io::Cursor;

fn stream(header: &Header, frames: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    write_header(&mut out, header).unwrap();
    for frame in frames {
        write_frame(&mut out, frame);
    }
    out
}

fn frames_of(header: &Header, count: usize) -> Vec<Vec<u8>> {
    (0..count)
        .map(|k| {
            (0..header.frame_bytes())
                .map(|i| (i * 7 + k * 31) as u8)
                .collect()
        })
        .collect()
}

fn read_all(bytes: Vec<u8>) -> Result<(Header, Vec<Vec<u8>>), InputError> {
    let mut reader = Reader::new(OneByteAtATime(Cursor::new(bytes)), "clip".into())?;
    let mut frame = vec![0; reader.header.frame_bytes()];
    let mut frames = Vec::new();
    while reader.read_frame(&mut frame)? {
        frames.push(frame.clone());
    }
    Ok((reader.header.clone(), frames))
}

fn error_of(bytes: impl Into<Vec<u8>>) -> String {
    read_all(bytes.into()).unwrap_err().to_string()
}

/// The stingiest pipe there is.
struct OneByteAtATime(Cursor<Vec<u8>>);

impl Read for OneByteAtATime {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = buf.len().min(1);
        self.0.read(&mut buf[..n])
    }
}

#[test]
fn what_is_written_is_read_back_in_every_format_and_odd_size() {
    for chroma in [Chroma::Mono, Chroma::C420, Chroma::C422, Chroma::C444] {
        for (width, height) in [(16, 16), (17, 16), (16, 19), (23, 31), (1, 1)] {
            let header = Header::new(width, height, chroma).unwrap();
            let frames = frames_of(&header, 3);
            let (read_header, read_frames) = read_all(stream(&header, &frames)).unwrap();
            assert_eq!(read_header, header);
            assert_eq!(read_frames, frames);
        }
    }
}

#[test]
fn a_sample_of_more_than_10_bits_is_named_by_its_place() {
    let header = Header::parse(b"YUV4MPEG2 W3 H3 C420p10").unwrap();
    let mut frames = [1023u16, 0, 512].map(|sample| sample.to_le_bytes().repeat(9 + 2 * 4));
    let whole = stream(&header, &frames);
    assert_eq!(read_all(whole).unwrap().1, frames);
    // The second row of the second chroma plane.
    frames[1][2 * 15..2 * 16].copy_from_slice(&1024u16.to_le_bytes());
    let broken = stream(&header, &frames);
    let frame_bytes = PLAIN.len() + header.frame_bytes();
    let offset = header.line().len() + 1 + frame_bytes + PLAIN.len() + 2 * 15;
    let error = read_all(broken.clone()).unwrap_err();
    assert!(error.follows_frames());
    assert_eq!(
        error.to_string(),
        format!(
            "clip: the sample at byte {offset} is 1024 (frame 1, plane 2, column 0, row 1), and 10 bits hold 1023 at most; \
             check the program that should have written samples of 10 bits, the lower byte first"
        )
    );
    // What reads ahead leaves such a frame to this reader.
    let folder = Folder::scratch();
    let path = folder.file("clip.y4m");
    std::fs::write(&path, broken).unwrap();
    let plain = Reader::open(&path).unwrap().plain_frames().unwrap();
    let mut frame = vec![0; header.frame_bytes()];
    assert!(plain.read(0, &mut frame) && plain.read(2, &mut frame));
    assert!(!plain.read(1, &mut frame));
}

#[test]
fn parameters_of_a_frame_are_accepted() {
    let (_, frames) =
        read_all(b"YUV4MPEG2 W2 H1 Cmono\nFRAME Ip XA=1\nabFRAME\ncd".to_vec()).unwrap();
    assert_eq!(frames, [b"ab", b"cd"]);
}

#[test]
fn a_cut_at_any_byte_is_an_error_except_between_frames() {
    let header = Header::new(5, 3, Chroma::C420).unwrap();
    let whole = stream(&header, &frames_of(&header, 2));
    let header_bytes = header.line().len() + 1;
    let frame_bytes = header.frame_bytes() + 6;
    for cut in 0..whole.len() {
        let result = read_all(whole[..cut].to_vec());
        if cut == header_bytes + frame_bytes {
            assert_eq!(result.unwrap().1.len(), 1);
            continue;
        }
        let error = result.unwrap_err();
        match cut {
            0 => assert!(matches!(error, InputError::Empty(_))),
            1..=8 => assert!(matches!(error, InputError::Foreign(..))),
            _ if cut < header_bytes => {
                assert!(matches!(error, InputError::Header(..)), "{error}")
            }
            _ if cut == header_bytes => assert!(matches!(error, InputError::NoFrames(_))),
            _ => {
                let InputError::Truncated { at, .. } = error else {
                    panic!("{cut}: {error}")
                };
                assert_eq!(at.offset, cut as u64);
                assert_eq!(at.frame, u64::from(cut > header_bytes + frame_bytes));
            }
        }
    }
}

#[test]
fn messages_name_file_place_and_remedy() {
    assert_eq!(
        error_of(&b"YUV4MPEG2 W2 H2 Cmono\nFRAME\nabcdFRAME\nab"[..]),
        "clip: truncated: frame 1 ends after 2 of 4 bytes, at byte 40; \
         check the program that should have written all of it"
    );
    assert_eq!(
        error_of(&b"YUV4MPEG2 W2 H2 Cmono\nFRAME\nabcd\x00\x01\n"[..]),
        "clip: no FRAME marker at byte 32, where frame 1 should begin, but \"\\x00\"; \
         the header's size or colour space may be wrong, or bytes were lost"
    );
    assert_eq!(
        error_of(&b"\x00\x00\x00\x20ftypisom"[..]),
        "clip: not a Y4M file but an MP4 or QuickTime file; convert it: \
         ffmpeg -i INPUT -pix_fmt yuv420p -f yuv4mpegpipe - | pp run --input -"
    );
    assert!(error_of(&b"YUV4MPEG2 W2 H2 C420p12\n"[..]).contains("colour space C420p12"));
    assert!(
        error_of(&b"YUV4MPEG2 W2 H20000\n"[..])
            .contains("height \"20000\" is not a number from 1 to 16384")
    );
}

#[test]
fn a_header_or_frame_line_without_end_is_bounded() {
    let mut long = b"YUV4MPEG2 W2 H2 X".to_vec();
    long.resize(1 << 20, b'x');
    assert!(error_of(long).contains("longer than 1024 bytes"));
    let mut long = b"YUV4MPEG2 W2 H2 Cmono\nFRAME X".to_vec();
    long.resize(1 << 20, b'x');
    assert!(error_of(long).contains("no FRAME marker at byte 22"));
}

#[test]
fn markers_that_only_look_right_are_refused() {
    for marker in ["FRAMES\n", "FRAM\nabcd", "frame\n", "\n", "FRAME\r\n"] {
        let text = format!("YUV4MPEG2 W2 H2 Cmono\n{marker}abcd");
        assert!(
            error_of(text.as_bytes()).contains("no FRAME marker"),
            "{marker:?}"
        );
    }
}

#[test]
fn a_frame_header_that_lies_about_the_size_is_seen_at_the_next_marker() {
    let header = Header::new(4, 4, Chroma::Mono).unwrap();
    let mut bytes = stream(&header, &frames_of(&header, 3));
    let at = bytes.windows(2).position(|w| w == b"W4").unwrap();
    bytes[at + 1] = b'3';
    assert!(matches!(
        read_all(bytes).unwrap_err(),
        InputError::NoMarker { at, .. } if at.frame == 1
    ));
}

#[test]
fn a_missing_file_and_a_directory_are_named() {
    let missing = Reader::open(Path::new("/nowhere/clip.y4m")).err().unwrap();
    assert!(
        missing
            .to_string()
            .starts_with("/nowhere/clip.y4m: cannot be opened: ")
    );
    let directory = Reader::open(Path::new("/")).err().unwrap();
    assert!(directory.to_string().contains("directory"), "{directory}");
}

#[test]
fn a_file_that_becomes_shorter_while_it_is_read_is_broken() {
    let scratch = Folder::scratch();
    let header = Header::new(640, 480, Chroma::C420).unwrap();
    let mut clip = Vec::new();
    write_header(&mut clip, &header).unwrap();
    let begin = clip.len();
    let frame = vec![100; header.frame_bytes()];
    (0..4).for_each(|_| write_frame(&mut clip, &frame));
    let path = scratch.file("clip.y4m");
    std::fs::write(&path, &clip).unwrap();
    let mut reader = Reader::open(&path).unwrap();
    let mut into = frame.clone();
    assert!(reader.read_frame(&mut into).unwrap());
    let two = (begin + 2 * (PLAIN.len() + header.frame_bytes())) as u64;
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(two)
        .unwrap();
    assert!(reader.read_frame(&mut into).unwrap());
    let error = reader.read_frame(&mut into).unwrap_err();
    let has_shrunk = matches!(&error, InputError::Shrunk { at, .. } if at.frame == 2);
    assert!(has_shrunk, "{error}");
}
