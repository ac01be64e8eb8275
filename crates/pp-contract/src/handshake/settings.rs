//! The settings that steer communication, as every rank has them.

use serde::{Deserialize, Serialize};

use crate::bounded::{List, Text, TooLong, check_len};

/// Most settings in one hello.
pub const MAX_SETTINGS: usize = 64;

type Setting = (Text<64>, Text<256>);

/// Settings by key: each key once, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "List<Setting, MAX_SETTINGS>")]
pub struct Settings(Vec<Setting>);

impl Settings {
    /// No setting so far.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Sets `key`; the value before it, if any, is replaced.
    ///
    /// # Errors
    /// [`TooLong`]: a key over 64 bytes, a value over 256, or more than [`MAX_SETTINGS`] of them.
    pub fn set(&mut self, key: &str, value: impl ToString) -> Result<(), TooLong> {
        let setting = (Text::try_from(key)?, Text::new(value.to_string())?);
        match self.find(key) {
            Ok(at) => self.0[at] = setting,
            Err(at) => {
                check_len(self.0.len() + 1, MAX_SETTINGS)?;
                self.0.insert(at, setting);
            }
        }
        Ok(())
    }

    /// The value of this key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.find(key).ok().map(|at| self.0[at].1.as_str())
    }

    /// Keys and values, in order of the keys.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }

    fn find(&self, key: &str) -> Result<usize, usize> {
        self.0.binary_search_by(|(own, _)| own.as_str().cmp(key))
    }
}

impl TryFrom<List<Setting, MAX_SETTINGS>> for Settings {
    type Error = &'static str;
    fn try_from(list: List<Setting, MAX_SETTINGS>) -> Result<Self, &'static str> {
        if !list.is_sorted_by(|(a, _), (b, _)| a < b) {
            return Err("settings are not in rising order of their keys");
        }
        Ok(Self(list.into_inner()))
    }
}
