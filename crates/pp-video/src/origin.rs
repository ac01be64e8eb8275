//! What decided the bytes of an output. A later run that is to give the same bytes, or those behind them, is compared with it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// The name of the digest of the input.
const INPUT: &str = "input";

/// Settings and kernels by name, and a digest of the first chunk of the input, once it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin(BTreeMap<String, String>);

impl Origin {
    /// Sets what has this name.
    #[must_use]
    pub fn set(mut self, name: &str, value: impl ToString) -> Self {
        self.0.insert(name.into(), value.to_string());
        self
    }

    /// Leaves out what has this name.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.0.remove(name);
        self
    }

    /// Gives what has this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The first chunk of the input has this digest.
    #[must_use]
    pub fn of_input(self, digest: u64) -> Self {
        self.set(INPUT, format_args!("{digest:016x}"))
    }

    /// Gives the digest of the first chunk of the input, once it was read.
    #[must_use]
    pub fn input(&self) -> Option<&str> {
        self.get(INPUT)
    }

    /// Says what is another one than it was before; inputs are compared once both are known.
    #[must_use]
    pub fn differs(&self, before: &Self) -> Option<String> {
        let names: BTreeSet<&String> = self.0.keys().chain(before.0.keys()).collect();
        let differs = |name: &String| match (before.get(name), self.get(name)) {
            (was, is) if was == is => None,
            (Some(_), Some(_)) if name == INPUT => {
                Some("the input begins with other frames".into())
            }
            _ if name == INPUT => None,
            (was, is) => {
                let [was, is] = [was, is].map(|value| value.unwrap_or("not given"));
                Some(format!("{name} was {was} and is {is}"))
            }
        };
        names.into_iter().find_map(differs)
    }
}

/// From names and values.
impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for Origin {
    fn from_iter<T: IntoIterator<Item = (N, V)>>(all: T) -> Self {
        let all = all.into_iter();
        Self(
            all.map(|(name, value)| (name.into(), value.into()))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let one = Origin::default().set("seed", 1).set("steps", 2);
        assert_eq!(one.differs(&one.clone().of_input(7)), None);
        for (other, told) in [
            (one.clone().set("seed", 2), "seed was 2 and is 1"),
            (one.clone().without("steps"), "steps was not given and is 2"),
            (one.clone().set("more", "x"), "more was x and is not given"),
        ] {
            assert_eq!(one.differs(&other).as_deref(), Some(told));
        }
        let [seven, eight] = [7, 8].map(|digest| one.clone().of_input(digest));
        assert!(seven.differs(&eight).unwrap().contains("other frames"));
    }
}
