//! Any environment: see [`crate::fuzz`].

use std::collections::HashMap;

use super::{Launch, LocalJob};
use crate::fuzz::Script;

/// Begins every secret here, and nothing else.
const SECRET: &str = "\u{1}s3cret\u{1}";
/// Set first, so that a script of chance gets somewhere.
const COMMON: [(&str, &str); 5] = [
    ("RANK", "1"),
    ("WORLD_SIZE", "2"),
    ("MASTER_ADDR", "host"),
    ("MASTER_PORT", "29500"),
    ("PP_JOB_SECRET", "\u{1}s3cret\u{1} of many bytes"),
];

/// The variables of any launcher with any values. A place that comes of it is whole, and neither
/// it nor a refusal shows the secret.
pub fn launch(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let mut variables: HashMap<&str, String> = HashMap::new();
    if script.byte() < 128 {
        variables.extend(COMMON.map(|(name, value)| (name, value.to_owned())));
    }
    while !script.is_over() {
        let names = LocalJob::LAUNCHER_VARIABLES;
        let name = names[usize::from(script.byte()) % names.len()];
        let count = usize::from(script.byte());
        let value = String::from_utf8_lossy(script.bytes(count));
        let value = match name {
            "PP_JOB_SECRET" => format!("{SECRET}{value}"),
            // Opens no file of somebody else's choice.
            "PP_JOB_SECRET_FILE" => ["/dev/null", "/", "/nonexistent"][count % 3].to_owned(),
            _ => value.replace(SECRET, ""),
        };
        variables.insert(name, value);
    }
    match Launch::from_env(|name| variables.get(name).cloned()) {
        Ok(Some(launch)) => {
            assert!(launch.world_size().contains(launch.rank()));
            assert!(launch.address().is_none_or(|address| address.port != 0));
            assert!(!format!("{launch:?}").contains(SECRET));
        }
        Ok(None) => {}
        Err(error) => {
            let text = format!("{error} {error:?}");
            assert!(!text.contains(SECRET) && !text.contains("s3cret"), "{text}");
        }
    }
}
