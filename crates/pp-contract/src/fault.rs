//! A fault: why a job ended, and which rank it blames. It travels with an abort.

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::bounded::Text;
use crate::codec::{self, BodyError};
use crate::ids::{ChunkIndex, Rank};

wire_enum! {
    /// What kind of thing ended the job.
    pub enum FaultKind {
        /// What the user gave cannot be worked on.
        BadInput = 1 => "bad input",
        /// A kernel plugin failed or was refused.
        Plugin = 2 => "plugin",
        /// A peer is gone.
        PeerDied = 3 => "peer died",
        /// A peer broke the contract.
        PeerMisbehaved = 4 => "peer misbehaved",
        /// Something did not happen in time.
        TimedOut = 5 => "timed out",
        /// The ranks were not started alike.
        HandshakeMismatch = 6 => "handshake mismatch",
        /// Reading the source or writing the sink failed.
        Io = 7 => "i/o",
        /// The user asked for it.
        Interrupted = 8 => "interrupted",
        /// A fault of our own.
        Internal = 9 => "internal error",
        /// A GPU, its driver or NCCL failed or is not there.
        Device = 10 => "device",
        /// A digest differs: bytes are not those that were sent, or that were there before.
        Drift = 11 => "drift",
        /// The command line, or the program that was written on this library, asks for what cannot be.
        Usage = 12 => "wrong usage",
        /// A GPU under NVIDIA's MPS failed, and with it every process on it. MPS does not say which process it was, and no rank is
        /// started again.
        SharedDevice = 13 => "shared device",
    }
}

impl FaultKind {
    /// Says whether another process in the place of the one that is blamed may do better: that one died, fell silent, or its
    /// device failed. What a plugin, the input or the protocol did would happen again.
    #[must_use]
    pub fn is_worth_a_restart(self) -> bool {
        matches!(self, Self::PeerDied | Self::TimedOut | Self::Device)
    }
}

/// Why a job ended, and which rank it blames. It shows as one line, without `stage`, `chunk` and `text`: control characters
/// in the others show as spaces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{kind}: rank {rank}: {operation}: {detail}")]
pub struct Fault {
    /// What kind of thing it was.
    pub kind: FaultKind,
    /// The rank it blames; not always the one that noticed.
    pub rank: Rank,
    /// What the rank that noticed the fault was doing, or the step of the job, such as "run".
    pub operation: Text<64>,
    /// What went wrong, and the remedy.
    pub detail: Text<512>,
    /// The stage whose call failed, as [`StageSpec::label`](crate::StageSpec::label) has it. `None` if it was in no stage.
    pub stage: Option<Text<48>>,
    /// The chunk on which that stage worked. `None` if it was no chunk's work.
    pub chunk: Option<ChunkIndex>,
    /// All that was said where `detail` has a part of it, such as the traceback of Python; else empty. For a person
    /// [`Fault::below`] has it.
    pub text: Text<{ Fault::MAX_TEXT_BYTES }>,
}

impl Fault {
    /// A fault without stage and chunk; what is too long is cut, between characters. Of a `detail` of several lines, or of one
    /// that is too long, the fault has the first line as its detail, and the whole as its text.
    #[must_use]
    pub fn new(kind: FaultKind, rank: Rank, operation: &str, detail: impl fmt::Display) -> Self {
        let whole = detail.to_string();
        let whole = whole.trim_end();
        let mut lines = whole.lines();
        let first = lines
            .find(|line| !line.trim().is_empty())
            .unwrap_or_default();
        let detail = Text::truncated(first);
        let text = match *detail == *whole {
            true => Text::default(),
            false => Text::truncated(whole),
        };
        Self {
            kind,
            rank,
            operation: Text::truncated(operation),
            detail,
            stage: None,
            chunk: None,
            text,
        }
    }

    /// This fault with another detail. The text stays, if there is one.
    #[must_use]
    pub fn with_detail(self, detail: impl fmt::Display) -> Self {
        let other = Self::new(self.kind, self.rank, &self.operation, detail);
        let text = match self.text.is_empty() {
            true => other.text,
            false => self.text,
        };
        Self {
            detail: other.detail,
            text,
            ..self
        }
    }

    /// This fault, which happened in a stage with this label, at work on `chunk`.
    #[must_use]
    pub fn in_stage(self, label: &str, chunk: Option<ChunkIndex>) -> Self {
        Self {
            stage: Some(Text::truncated(label)),
            chunk,
            ..self
        }
    }

    /// This fault without its text: its encoding has at most [`Fault::MAX_BYTES_WITHOUT_TEXT`].
    #[must_use]
    pub fn without_text(&self) -> Self {
        Self {
            text: Text::default(),
            ..self.clone()
        }
    }

    /// What a person reads below the line that the fault shows as; empty if that line says all. Control characters other than
    /// the end of a line and the tabulator show as spaces.
    #[must_use]
    pub fn below(&self) -> String {
        // The line above has it.
        let rest = self.text.strip_prefix(&*self.detail);
        let rest = rest.and_then(|rest| rest.strip_prefix('\n'));
        let visible = |c: char| match c {
            '\n' | '\t' => c,
            c if c.is_control() => ' ',
            c => c,
        };
        rest.unwrap_or(&self.text).chars().map(visible).collect()
    }

    /// The bytes of the fault, at most [`Fault::MAX_BYTES`].
    ///
    /// # Errors
    /// [`BodyError`]; a fault always fits, so none is known to occur.
    pub fn encode(&self) -> Result<Vec<u8>, BodyError> {
        codec::encode("a fault", self)
    }

    /// Decodes a fault that takes up `bytes` entirely.
    ///
    /// # Errors
    /// [`BodyError::Malformed`], [`BodyError::Trailing`].
    pub fn decode(bytes: &[u8]) -> Result<Self, BodyError> {
        codec::decode("a fault", bytes)
    }

    /// Most bytes of the text.
    pub const MAX_TEXT_BYTES: usize = 16 << 10;

    /// Most bytes of an encoded fault without a text: kind, rank, two texts with their lengths, stage, chunk, and the length 0.
    pub const MAX_BYTES_WITHOUT_TEXT: usize =
        1 + 5 + (1 + 64) + (2 + 512) + (1 + 1 + 48) + (1 + 10) + 1;

    /// Most bytes of an encoded fault. The length of the longest text takes two bytes more than the length 0.
    pub const MAX_BYTES: usize = Self::MAX_BYTES_WITHOUT_TEXT + 2 + Self::MAX_TEXT_BYTES;
}

/// An error and the chain of its causes, on one line.
#[must_use]
pub fn with_source(error: &(dyn core::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        // Some errors name their cause themselves.
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(detail: &str) -> Fault {
        Fault::new(FaultKind::Plugin, Rank::new(1), "run", detail)
    }

    #[test]
    fn a_detail_of_one_line_is_all_and_of_several_the_first_is_the_detail() {
        for (whole, detail, text, below) in [
            ("one line", "one line", "", ""),
            ("one line\n", "one line", "", ""),
            ("", "", "", ""),
            ("first\nsecond\n", "first", "first\nsecond", "second"),
            (
                "\n first\n\tsecond",
                " first",
                "\n first\n\tsecond",
                "\n first\n\tsecond",
            ),
        ] {
            let fault = fault(whole);
            let texts = [&*fault.detail, &*fault.text, &fault.below()];
            assert_eq!(texts, [detail, text, below], "{whole:?}");
            assert_eq!(fault.to_string(), format!("plugin: rank 1: run: {detail}"));
        }
    }

    #[test]
    fn a_detail_that_is_too_long_is_cut_between_characters_and_is_in_the_text() {
        // Each character has two bytes, and the first one stands at an odd place.
        let long = format!("a{}", "é".repeat(9000));
        let fault = fault(&long);
        assert_eq!((fault.detail.len(), fault.text.len()), (511, 16_383));
        assert!(long.starts_with(&*fault.text) && long.starts_with(&*fault.detail));
        assert_eq!(fault.below(), &*fault.text);
    }

    #[test]
    fn no_control_character_of_a_peer_gets_to_a_terminal() {
        let said = "first\x1b[2J\nsecond\x1b[2J\r\u{9b}1m\n\tthird\x07";
        let fault = Fault::decode(&fault(said).encode().unwrap()).unwrap();
        assert_eq!(fault.to_string(), "plugin: rank 1: run: first [2J");
        assert_eq!(fault.below(), "second [2J  1m\n\tthird ");
    }

    #[test]
    fn another_detail_leaves_the_rest_and_a_text_over_its_bound_is_refused() {
        let chunk = Some(ChunkIndex::new(3));
        let first = fault("first\nsecond").in_stage("b", chunk);
        let other = first.clone().with_detail("1 restart was used: first");
        let expected = Fault {
            detail: Text::truncated("1 restart was used: first"),
            ..first.clone()
        };
        assert_eq!(other, expected);
        assert_eq!(other.below(), "first\nsecond");
        let short = first.without_text().with_detail("third\nfourth");
        assert_eq!(
            (&*short.text, short.stage, short.chunk),
            ("third\nfourth", first.stage.clone(), chunk)
        );

        let mut bytes = first.without_text().encode().unwrap();
        bytes.pop();
        // 16,385 as a varint.
        bytes.extend([0x81, 0x80, 0x01]);
        bytes.extend([b'x'; Fault::MAX_TEXT_BYTES + 1]);
        assert!(Fault::decode(&bytes).is_err());
    }
}
