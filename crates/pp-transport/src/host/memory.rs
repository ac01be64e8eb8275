//! How much memory there is to ask for.
//!
//! Hazard: shared memory that is asked for is given, page by page, until the kernel kills
//! processes at random to have more. So it is compared with what is there before it is asked for.

use std::fs;
use std::path::Path;

/// Bytes that this process can still get: of the machine's memory, or of its control group's where
/// that is less. `None` where the kernel does not say.
pub fn available_bytes() -> Option<u64> {
    let machine = of_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let group = of_group(Path::new("/sys/fs/cgroup"));
    Some(group.map_or(machine, |left| left.min(machine)))
}

fn of_meminfo(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What is left of a control group's limit, if it has one.
fn of_group(group: &Path) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        fs::read_to_string(group.join(name))
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    let used = number("memory.current")?;
    // Pages of files count as used, and are given back when somebody asks.
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let files: u64 = stat
        .lines()
        .filter_map(|line| {
            line.strip_prefix("inactive_file ")
                .or(line.strip_prefix("active_file "))
        })
        .filter_map(|bytes| bytes.trim().parse::<u64>().ok())
        .sum();
    Some(number("memory.max")?.saturating_sub(used.saturating_sub(files)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_and_it_is_not_nothing() {
        assert!(available_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn the_right_line_is_read_in_the_right_unit() {
        let text = "MemTotal:  24 kB\nMemFree: 1 kB\nMemAvailable:   17 kB\n";
        assert_eq!(of_meminfo(text), Some(17 * 1024));
        assert_eq!(of_meminfo("MemTotal: 24 kB\n"), None);
        assert_eq!(of_meminfo("MemAvailable: many kB\n"), None);
    }

    #[test]
    fn a_group_without_a_limit_has_none() {
        assert_eq!(of_group(Path::new("/no/such/group")), None);
    }
}
