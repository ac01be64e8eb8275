//! NCCL's variables as settings of the handshake.

use pp_contract::digest;

/// The longest name, and below the longest value, of a setting in the handshake, in bytes.
const LONGEST_NAME: usize = 64;
const LONGEST_VALUE: usize = 256;
/// The most NCCL variables that become settings of their own. The handshake has room for 64 settings in all.
const MOST_VARIABLES: usize = 32;
/// The name of the setting that stands for all other variables.
const OTHER_VARIABLES: &str = "other_nccl_variables";

/// Tells whether a variable must be the same on all ranks. Others describe one machine, or steer its output.
fn is_for_all(name: &str) -> bool {
    const OWN: [&str; 8] = [
        "NCCL_DEBUG",
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_TOPO",
        "NCCL_GRAPH",
        "NCCL_HOSTID",
        "NCCL_CONF_FILE",
        "NCCL_HOME",
    ];
    name.starts_with("NCCL_") && !OWN.iter().any(|own| name.starts_with(own))
}

/// Turns variables into settings of the handshake. A value that is too long is compared by its digest. All variables
/// that do not fit are compared by one digest together, in a setting that lists as many of their names as there is room
/// for.
pub(super) fn as_settings(mut variables: Vec<(String, String)>) -> Vec<(String, String)> {
    let digest_of = |bytes: &[u8]| format!("digest {:016x}", digest(bytes));
    variables.retain(|(name, _)| is_for_all(name));
    variables.sort_unstable();
    let (mut settings, mut others) = (Vec::new(), Vec::new());
    for (name, value) in variables {
        if name.len() > LONGEST_NAME || settings.len() == MOST_VARIABLES {
            others.push((name, value));
        } else if value.len() > LONGEST_VALUE {
            settings.push((name, digest_of(value.as_bytes())));
        } else {
            settings.push((name, value));
        }
    }
    if !others.is_empty() {
        // The value of a variable never contains a zero byte, so a zero byte can end it.
        let all = others
            .iter()
            .map(|(name, value)| format!("{name}={value}\0"));
        let all = digest_of(all.collect::<String>().as_bytes());
        let mut value = format!("{all} of {}:", others.len());
        for (name, _) in &others {
            value += " ";
            value += name;
        }
        value.truncate(value.floor_char_boundary(LONGEST_VALUE));
        settings.push((OTHER_VARIABLES.to_owned(), value));
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_variables_fit_the_handshake_and_each_counts() {
        let long = format!("NCCL_{}", "X".repeat(100));
        let many = || {
            let names = (0..200).map(|n| format!("NCCL_{n:03}"));
            let all = names.chain([long.clone(), "NCCL_Y".into()]);
            all.map(|name| (name, "1".to_owned())).collect::<Vec<_>>()
        };
        let hello = |variables| {
            let mut settings = pp_contract::Settings::new();
            for (name, value) in as_settings(variables) {
                settings.set(&name, value).expect("it fits");
            }
            settings
        };
        let all = hello(many());
        assert_eq!(all.iter().len(), MOST_VARIABLES + 1);
        let others = all.get(OTHER_VARIABLES).expect("one for the others");
        assert!(others.contains("of 170: NCCL_032 NCCL_033 "), "{others}");
        let reversed = many().into_iter().rev().collect();
        assert!(hello(reversed) == all, "the order counts");
        for at in 0..many().len() {
            let mut changed = many();
            changed[at].1 = "2".into();
            assert!(hello(changed) != all, "variable {at} does not count");
        }
        let name = ("NCCL_A".to_owned(), "v".repeat(300));
        assert!(
            hello(vec![name])
                .get("NCCL_A")
                .is_some_and(|v| v.starts_with("digest "))
        );
        assert_eq!(hello(vec![(long, "1".into())]).iter().len(), 1);
    }
}
