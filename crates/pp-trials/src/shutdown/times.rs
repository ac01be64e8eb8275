//! The times of a cell.

use std::time::Duration;

use serde::{Serialize, Serializer};

/// The times of a cell, or their bounds; as JSON in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Times {
    /// From the event to the moment at which we knew of a fault.
    #[serde(serialize_with = "milliseconds")]
    pub(super) noticed: Option<Duration>,
    /// From the event to our end.
    #[serde(serialize_with = "milliseconds")]
    pub(super) gone: Option<Duration>,
    /// From the event to the end of the last rank that can end.
    #[serde(serialize_with = "milliseconds")]
    pub(super) all_gone: Option<Duration>,
    /// From the moment at which a peer that was stopped goes on to its end.
    #[serde(serialize_with = "milliseconds")]
    pub(super) resumed: Option<Duration>,
}

fn milliseconds<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    let ms = time.map(|time| (time.as_secs_f64() * 10_000.0).round() / 10.0);
    ms.serialize(to)
}
