//! The header of the clip, which rank 0 reads and tells every other rank before the first chunk.
//!
//! Hazard: to the other ranks the header comes from a peer, and it sizes what they allocate. Guarantee: the header in a
//! [`Shape`] was checked as that of a file is.

use pp_kernels::SessionConfig;
use pp_video::header::{Header, MAX_HEADER_BYTES};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The header of the clip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape(pub(super) Header);

impl Serialize for Shape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0.line())
    }
}

/// A header from a peer.
impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let refuse = serde::de::Error::custom::<String>;
        let line = Vec::<u8>::deserialize(deserializer)?;
        if line.len() > MAX_HEADER_BYTES {
            let (has, most) = (line.len(), MAX_HEADER_BYTES);
            return Err(refuse(format!(
                "a header of {has} bytes; {most} at most can be"
            )));
        }
        let header = Header::parse(&line).map_err(|fault| refuse(fault.to_string()))?;
        let (width, height, least) = (header.width(), header.height(), SessionConfig::MIN_SIDE);
        if width < least || height < least {
            return Err(refuse(format!(
                "frames of {width}x{height}; {least}x{least} is the smallest"
            )));
        }
        Ok(Self(header))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLD: &[u8] = b"YUV4MPEG2 W352 H289 F30000:1001 Ip A128:117 C420jpeg XA";

    fn hear(line: &[u8]) -> Result<Shape, String> {
        let told = postcard::to_allocvec(line).unwrap();
        postcard::from_bytes(&told).map_err(|error| error.to_string())
    }

    #[test]
    fn header_survives_as_it_was() {
        let shape = hear(TOLD).unwrap();
        assert_eq!(shape.0.line(), TOLD);
        let again = postcard::to_allocvec(&shape).unwrap();
        assert_eq!(postcard::from_bytes(&again).as_ref(), Ok(&shape));
    }

    #[test]
    fn a_header_with_an_impossible_size_or_format_is_refused() {
        let text = String::from_utf8(TOLD.to_vec()).unwrap();
        for (from, to) in [
            ("W352", "W0"),
            ("H289", "H20000"),
            ("W352", "W15"),
            ("C420jpeg", "C420p12"),
            ("YUV4", "YUV5"),
        ] {
            assert!(text.contains(from));
            assert!(hear(text.replace(from, to).as_bytes()).is_err(), "{to}");
        }
        let long = [TOLD, &[b' '; MAX_HEADER_BYTES]].concat();
        assert!(hear(&long).is_err());
        assert!(hear(b"YUV4MPEG2 W352 H289 \xff").is_err());
    }
}
