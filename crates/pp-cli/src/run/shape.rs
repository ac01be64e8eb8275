//! The shape of the work, as the front tells it to Phase B.
//!
//! Hazard: it comes from a peer, and sizes what Phase B allocates. Guarantee: a value of [`Shape`]
//! has sides, slots and sizes that there can be, however it was made; what cannot be is refused
//! with its number before anything is allocated for it.

use pp_contract::MAX_PAYLOAD_BYTES;
use pp_kernels::Chroma;
use pp_transport::backend::Edges;
use pp_transport::host::{EdgeShape, MAX_SLOTS};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::codec::Geometry;
use crate::video::header::MAX_SIDE;

/// What may lie behind a payload in its slot.
const BESIDE_PAYLOAD: u64 = 1 << 16;

/// What the front found in its input, and Phase B must know before its first chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct Shape {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) planes: Chroma,
    pub(super) frame_bytes: u64,
    /// Slots of the edge to Phase B: with restarts more than are ever in flight.
    pub(super) forward_slots: u32,
    pub(super) forward_bytes: u64,
    pub(super) backward_bytes: u64,
}

impl Serialize for Shape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

/// A shape as it was told, by whomever.
impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let told = Self::deserialize(deserializer)?;
        told.check().map_err(serde::de::Error::custom)?;
        Ok(told)
    }
}

impl Shape {
    fn check(&self) -> Result<(), String> {
        let most = MAX_PAYLOAD_BYTES + BESIDE_PAYLOAD;
        let is = |what: &str, value: u64, most: u64| {
            if (1..=most).contains(&value) {
                return Ok(());
            }
            Err(format!("{what} of {value}; 1 to {most} can be"))
        };
        let (width, height, planes) = (self.width, self.height, self.planes);
        is("a width", width.into(), MAX_SIDE.into())?;
        is("a height", height.into(), MAX_SIDE.into())?;
        is(
            "a number of slots",
            self.forward_slots.into(),
            MAX_SLOTS.into(),
        )?;
        is("a payload", self.forward_bytes, most)?;
        is("a payload", self.backward_bytes, most)?;
        let (given, expected) = (
            self.frame_bytes,
            planes.packed_frame_bytes(width, height) as u64,
        );
        if given != expected {
            return Err(format!(
                "{given} bytes in a frame of {width}x{height} {planes:?}, which has {expected}"
            ));
        }
        Ok(())
    }

    /// Both edges, for so many chunks in flight.
    pub(super) fn edges(self, depth: u32) -> Edges {
        let edge = |depth, slot_bytes| EdgeShape { depth, slot_bytes };
        Edges {
            up: edge(self.forward_slots, self.forward_bytes),
            down: edge(depth, self.backward_bytes),
        }
    }

    /// Bytes of the largest slot.
    pub(super) fn largest(self) -> u64 {
        self.forward_bytes.max(self.backward_bytes)
    }

    pub(super) fn geometry(self) -> Geometry {
        Geometry {
            width: self.width,
            height: self.height,
            chroma: self.planes,
            frame_bytes: self.frame_bytes as usize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLD: &str = r#"[0,{"width":352,"height":289,"planes":"C420","frame_bytes":152768,"forward_slots":4,"forward_bytes":900000,"backward_bytes":600000}]"#;

    fn hear(text: &str) -> Result<(u32, Shape), String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_shape_survives_and_what_cannot_be_is_refused_with_its_number() {
        let (generation, shape) = hear(TOLD).unwrap();
        assert_eq!(
            hear(&serde_json::to_string(&(generation, shape)).unwrap()),
            Ok((0, shape))
        );
        let other = |from: &str, to: &str| {
            assert!(TOLD.contains(from));
            hear(&TOLD.replace(from, to)).unwrap_err()
        };
        for (from, to, words) in [
            ("352", "0", "a width of 0"),
            ("289", "20000", "a height of 20000; 1 to 16384"),
            (
                "152768",
                "152767",
                "152767 bytes in a frame of 352x289 C420, which has 152768",
            ),
            (
                "\"forward_slots\":4",
                "\"forward_slots\":129",
                "slots of 129; 1 to 128",
            ),
            (
                "900000",
                "18446744073709551615",
                "a payload of 18446744073709551615",
            ),
            ("600000", "0", "a payload of 0"),
        ] {
            let error = other(from, to);
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn any_change_of_a_byte_is_refused_or_survives() {
        for at in 0..TOLD.len() {
            for byte in [b'0', b'9', b'-', b'.', b'"', b'}', b'e', 0, 0xff] {
                let mut bytes = TOLD.as_bytes().to_vec();
                bytes[at] = byte;
                for bytes in [&bytes[..], &bytes[..at]] {
                    if let Ok(told) = serde_json::from_slice::<(u32, Shape)>(bytes) {
                        let again = serde_json::to_vec(&told).unwrap();
                        assert_eq!(serde_json::from_slice(&again).ok(), Some(told));
                    }
                }
            }
        }
    }
}
