//! Any environment: see [`crate::fuzz`].

use std::collections::HashMap;

use super::{Launch, LocalJob};
use pp_words::fuzz::Script;

/// Begins every secret here, and is in nothing else.
const SECRET: &str = "s3cret";
/// Set first, so that a script of chance gets somewhere.
const COMMON: [(&str, &str); 5] = [
    ("RANK", "1"),
    ("WORLD_SIZE", "2"),
    ("MASTER_ADDR", "host"),
    ("MASTER_PORT", "29500"),
    ("PP_JOB_SECRET", "s3cret of many bytes"),
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
        let names: Vec<_> = LocalJob::launcher_variables().collect();
        let name = names[usize::from(script.byte()) % names.len()];
        let count = usize::from(script.byte());
        let mut value = String::from_utf8_lossy(script.bytes(count)).into_owned();
        // More than once: what is left may make another.
        while value.contains(SECRET) {
            value = value.replace(SECRET, "");
        }
        let value = match name {
            "PP_JOB_SECRET" => format!("{SECRET}{value}"),
            // Opens no file of somebody else's choice.
            "PP_JOB_SECRET_FILE" => ["/dev/null", "/", "/nonexistent"][count % 3].to_owned(),
            _ => value,
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
            assert!(!text.contains(SECRET), "{text}");
        }
    }
}
