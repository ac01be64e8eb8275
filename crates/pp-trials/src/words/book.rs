//! The words of messages, and what is wrong with those that came.

use std::fmt;
use std::io::Write as _;
use std::ops::{Add, Range};

use pp_testing::Random;
use serde::Serialize;

/// Passages begin in so many bytes at the beginning of the book, each at a multiple of 8.
const BEGINNINGS: u64 = 1 << 20;
/// Bytes of a word.
const WORD: usize = 4;

/// A book of random words.
pub(super) struct Book(Vec<u8>);

/// The words of a message.
#[derive(Clone, Copy)]
pub(super) struct Passage {
    pub(super) number: u64,
    pub(super) at: usize,
    pub(super) bytes: usize,
}

impl Passage {
    /// Of the message with this number. Those of messages that follow one another have nothing in common.
    pub(super) fn new(number: u64, bytes: u64) -> Self {
        let at = Random::new(number).below(BEGINNINGS / 8) * 8;
        Self {
            number,
            at: at as usize,
            bytes: bytes as usize,
        }
    }

    fn range(self) -> Range<usize> {
        self.at..self.at + self.bytes
    }
}

/// How often the words of a message were digested otherwise than they are, and how many are otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Wrong {
    /// Messages of which something is wrong.
    #[serde(rename = "wrong_messages")]
    pub(super) messages: u64,
    /// Words that came back wrong.
    #[serde(rename = "wrong_words")]
    words: u64,
    /// Digests of ranks 0 and 1 that are wrong.
    #[serde(rename = "wrong_digests")]
    digests: [u64; 2],
}

impl Add for Wrong {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            messages: self.messages + other.messages,
            words: self.words + other.words,
            digests: [0, 1].map(|rank| self.digests[rank] + other.digests[rank]),
        }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rank_0, rank_1] = self.digests;
        write!(
            f,
            "{} wrong words, {rank_0} wrong digests on rank 0 and {rank_1} on rank 1, in {} messages",
            self.words, self.messages
        )
    }
}

impl Book {
    /// For passages of so many bytes at the most.
    pub(super) fn new(seed: u64, max_bytes: u64) -> Self {
        let mut random = Random::new(seed);
        let numbers = (BEGINNINGS + max_bytes).div_ceil(8);
        Self(
            (0..numbers)
                .flat_map(|_| random.any().to_le_bytes())
                .collect(),
        )
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn passage(&self, passage: Passage) -> &[u8] {
        &self.0[passage.range()]
    }

    /// What is wrong with these words, and with the digests that ranks 0 and 1 made of them. Says so on standard error.
    pub(super) fn compare(
        &self,
        passage: Passage,
        words: &[u8],
        digests: [u64; 2],
        right: u64,
    ) -> Wrong {
        let book = self.passage(passage);
        let digests = digests.map(|digest| u64::from(digest != right));
        if words == book && digests == [0, 0] {
            return Wrong::default();
        }
        let pairs = || words.chunks(WORD).zip(book.chunks(WORD)).enumerate();
        let mut differing = pairs().filter(|(_, (word, right))| word != right);
        let first = differing.next();
        let wrong = Wrong {
            messages: 1,
            words: first.iter().count() as u64 + differing.count() as u64,
            digests,
        };
        let Passage { number, bytes, .. } = passage;
        let place = first.map_or_else(String::new, |(at, (word, right))| {
            format!(
                "; the first at byte {} is {word:02x?} and not {right:02x?}",
                at * WORD
            )
        });
        // If standard error is closed, the line is lost.
        let line = format!("pp-trials: message {number} of {bytes} bytes: {wrong}{place}\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1003;

    #[test]
    fn each_wrong_word_is_counted_and_the_tail_is_one() {
        let book = Book::new(1, BYTES);
        let passage = Passage::new(7, BYTES);
        let right = book.passage(passage).to_vec();
        assert_eq!(book.compare(passage, &right, [5; 2], 5), Wrong::default());
        let mut words = right;
        for byte in [0, 3, 4, 1000, 1002] {
            words[byte] ^= 1;
        }
        let wrong = book.compare(passage, &words, [5, 6], 5);
        let expected = Wrong {
            messages: 1,
            words: 3,
            digests: [0, 1],
        };
        assert_eq!(wrong, expected);
        assert_eq!((wrong + wrong).digests, [0, 2]);
        assert_eq!((wrong + wrong).words, 6);
    }

    #[test]
    fn messages_that_follow_one_another_have_no_word_in_common() {
        let book = Book::new(1, BYTES);
        for number in 0..1000 {
            let [a, b] = [number, number + 1].map(|number| Passage::new(number, BYTES));
            let pairs = book
                .passage(a)
                .chunks(WORD)
                .zip(book.passage(b).chunks(WORD));
            assert!(pairs.filter(|(a, b)| a == b).count() <= 1, "{number}");
        }
    }
}
