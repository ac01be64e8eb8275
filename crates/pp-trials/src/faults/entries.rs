//! The catalogue itself.

mod by_name;
mod by_number;

use super::catalogue::Entry;

/// All entries: by the rules' numbers, then by their names.
pub(super) fn all() -> impl Iterator<Item = &'static Entry> {
    by_number::ALL.iter().chain(by_name::ALL)
}
