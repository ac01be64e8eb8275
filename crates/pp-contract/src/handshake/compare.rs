//! Two hellos side by side, key by key.

use std::collections::BTreeSet;

use super::{Hello, HelloParts};
use crate::ids::Rank;

/// The key of ranks of which one works in host memory and the other one in that of a GPU.
const MEMORY: &str = "memory";

/// Two ranks that were not started alike.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{key} differs: rank {left} has {left_value}, rank {right} has {right_value}; {}",
    remedy(key)
)]
pub struct Mismatch {
    /// What differs; settings, those of devices too, go by `settings.` and their key.
    pub key: String,
    /// One rank.
    pub left: Rank,
    /// What it has, or `(not set)`.
    pub left_value: String,
    /// The other rank.
    pub right: Rank,
    /// What that has, or `(not set)`.
    pub right_value: String,
}

fn remedy(key: &str) -> &'static str {
    match key {
        MEMORY => "name the devices of all ranks (--devices), or see why one found no GPU",
        _ => "start every rank with the same value",
    }
}

/// Checks that two ranks were started alike: job, world, plan, counts, and each setting.
/// Where they run and on which device is for [`check_devices`](super::check_devices).
///
/// `device_settings` are compared between two ranks on devices. A rank in host memory stands beside one on a device only if
/// the job names the `devices` of its ranks.
///
/// # Errors
/// [`Mismatch`]: the first difference, the most general one first.
pub fn compare(a: &Hello, b: &Hello) -> Result<(), Mismatch> {
    let mismatch = |key: String, left: Option<String>, right: Option<String>| {
        let not_set = || "(not set)".to_owned();
        Err(Mismatch {
            key,
            left: a.rank(),
            left_value: left.unwrap_or_else(not_set),
            right: b.rank(),
            right_value: right.unwrap_or_else(not_set),
        })
    };
    let pairs = fields(a.parts()).into_iter().zip(fields(b.parts()));
    for ((key, left), (_, right)) in pairs {
        if left != right {
            return mismatch(key.to_owned(), left, right);
        }
    }
    let (ours, theirs) = (a.parts(), b.parts());
    let memory = |parts: &HelloParts| match parts.device {
        Some(_) => "GPU",
        None => "host",
    };
    let (left, right) = (memory(ours), memory(theirs));
    if left != right && ours.settings.get("devices").is_none() {
        return mismatch(MEMORY.into(), Some(left.into()), Some(right.into()));
    }
    let mut compared = vec![(&ours.settings, &theirs.settings)];
    if ours.device.is_some() && theirs.device.is_some() {
        compared.push((&ours.device_settings, &theirs.device_settings));
    }
    for (ours, theirs) in compared {
        let keys = ours.iter().chain(theirs.iter()).map(|(key, _)| key);
        // The pipeline first: defaults of other settings follow from it.
        let keys: BTreeSet<(bool, &str)> = keys.map(|key| (key != "pipeline", key)).collect();
        for (_, key) in keys {
            let (left, right) = (ours.get(key), theirs.get(key));
            if left != right {
                let quoted = |value: Option<&str>| value.map(|value| format!("{value:?}"));
                return mismatch(format!("settings.{key}"), quoted(left), quoted(right));
            }
        }
    }
    Ok(())
}

/// The fields that must agree, by name and as text. Nothing is left out by accident: a new field
/// does not compile until it stands here, compared or not.
fn fields(parts: &HelloParts) -> [(&'static str, Option<String>); 5] {
    let HelloParts {
        job,
        rank: _,
        world_size,
        plan_name,
        plan_version,
        settings: _,
        device_settings: _,
        chunks,
        host: _,
        device: _,
        device_given: _,
        device_named: _,
    } = parts;
    [
        ("job", Some(format!("{job:016x}"))),
        ("world_size", Some(world_size.to_string())),
        ("plan", Some(format!("{:?}", plan_name.as_str()))),
        ("plan_version", Some(plan_version.to_string())),
        ("chunks", chunks.map(|chunks| chunks.to_string())),
    ]
}
