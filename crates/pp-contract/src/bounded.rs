//! Text and lists that carry their bound in the type.
//!
//! *Hazard.* A decoder that reserves what a length prefix promises lets a peer size an allocation.
//! *Guarantee.* A [`Text`] or [`List`] refuses a length over its bound before it allocates, on the
//! way in and on the way out.

use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// More bytes or items than the type allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("length {len} is over the bound of {max}; shorten it")]
pub struct TooLong {
    /// The length offered, in bytes for text and in items for a list.
    pub len: usize,
    /// The bound.
    pub max: usize,
}

/// UTF-8 text of at most `MAX` bytes. It decodes from a format that lends its text, as postcard does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "&str")]
pub struct Text<const MAX: usize>(Box<str>);

impl<const MAX: usize> Text<MAX> {
    /// The text, if it is within the bound.
    ///
    /// # Errors
    /// [`TooLong`] when it is not.
    pub fn new(text: impl Into<String>) -> Result<Self, TooLong> {
        let text = text.into();
        check_len(text.len(), MAX)?;
        Ok(Self(text.into_boxed_str()))
    }

    /// As much of the text as fits, cut between characters. For messages to people.
    #[must_use]
    pub fn truncated(text: &str) -> Self {
        Self(text[..text.floor_char_boundary(MAX)].into())
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<const MAX: usize> Deref for Text<MAX> {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

/// For people, on one line: a text may come from a peer, so control characters show as spaces.
impl<const MAX: usize> fmt::Display for Text<MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        let visible = |c: char| if c.is_control() { ' ' } else { c };
        self.0.chars().try_for_each(|c| f.write_char(visible(c)))
    }
}

impl<const MAX: usize> TryFrom<&str> for Text<MAX> {
    type Error = TooLong;
    fn try_from(text: &str) -> Result<Self, TooLong> {
        check_len(text.len(), MAX)?;
        Ok(Self(text.into()))
    }
}

/// A list of at most `MAX` items.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct List<T, const MAX: usize>(Vec<T>);

impl<T, const MAX: usize> List<T, MAX> {
    /// The list, if it is within the bound.
    ///
    /// # Errors
    /// [`TooLong`] when it is not.
    pub fn new(items: Vec<T>) -> Result<Self, TooLong> {
        check_len(items.len(), MAX)?;
        Ok(Self(items))
    }

    /// Adds an item at the end.
    ///
    /// # Errors
    /// [`TooLong`] when there is no room for it.
    pub fn push(&mut self, item: T) -> Result<(), TooLong> {
        check_len(self.0.len() + 1, MAX)?;
        self.0.push(item);
        Ok(())
    }

    /// The items, free of the bound.
    #[must_use]
    pub fn into_inner(self) -> Vec<T> {
        self.0
    }
}

impl<T, const MAX: usize> Default for List<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const MAX: usize> Deref for List<T, MAX> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T, const MAX: usize> DerefMut for List<T, MAX> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for ListVisitor<T, MAX> {
            type Value = List<T, MAX>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX} items")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                // The hint of postcard is the length on the wire, or nothing when fewer bytes
                // are left than that: an item takes at least one byte.
                let len = seq.size_hint().ok_or_else(|| A::Error::custom("length"))?;
                check_len(len, MAX).map_err(A::Error::custom)?;
                let mut items = Vec::with_capacity(len);
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(List(items))
            }
        }
        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}

pub(crate) fn check_len(len: usize, max: usize) -> Result<(), TooLong> {
    if len > max {
        return Err(TooLong { len, max });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_over_its_bound_is_refused_both_ways() {
        assert_eq!(Text::<3>::new("abcd"), Err(TooLong { len: 4, max: 3 }));
        assert!(postcard::from_bytes::<Text<3>>(b"\x04abcd").is_err());
        assert_eq!(
            &*postcard::from_bytes::<Text<3>>(b"\x03abc").unwrap(),
            "abc"
        );
    }

    #[test]
    fn truncation_cuts_between_characters() {
        assert_eq!(&*Text::<4>::truncated("aéé"), "aé");
        assert_eq!(&*Text::<5>::truncated("aéé"), "aéé");
        assert_eq!(&*Text::<0>::truncated("é"), "");
    }

    #[test]
    fn display_is_one_line_whatever_a_peer_wrote() {
        let text = Text::<16>::new("a\nb\x1b[2J").unwrap();
        assert_eq!(text.to_string(), "a b [2J");
        assert_eq!(text.as_str(), "a\nb\x1b[2J");
    }

    #[test]
    fn list_over_its_bound_is_refused_both_ways() {
        assert_eq!(
            List::<u8, 2>::new(vec![1, 2, 3]),
            Err(TooLong { len: 3, max: 2 })
        );
        assert!(postcard::from_bytes::<List<u8, 2>>(&[3, 1, 2, 3]).is_err());
        let mut full = postcard::from_bytes::<List<u8, 2>>(&[2, 1, 2]).unwrap();
        assert_eq!(full.push(3), Err(TooLong { len: 3, max: 2 }));
        assert_eq!(&*full, [1, 2]);
    }

    #[test]
    fn list_that_promises_more_items_than_bytes_is_refused() {
        assert!(postcard::from_bytes::<List<u64, 1000>>(&[200, 1, 7]).is_err());
    }
}
