//! How much memory this process can still get.
//!
//! Hazard: the kernel grants shared memory page by page until it kills processes at random to find more. So a request
//! is compared with the available memory first.

use std::fs;
use std::path::{Path, PathBuf};

/// Reads the text of a file, if it can be read.
type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// Returns the bytes that this process can still get: of the machine's memory, or of the limit of a control group
/// around it if that is less. `None` if the kernel does not say.
pub fn available_bytes() -> Option<u64> {
    available_by(&|path| fs::read_to_string(path).ok())
}

fn available_by(read: Read<'_>) -> Option<u64> {
    let machine = of_meminfo(&read(Path::new("/proc/meminfo"))?)?;
    let groups = groups(read).into_iter();
    let left = groups.filter_map(|(version, group)| version.left(read, &group));
    Some(left.fold(machine, u64::min))
}

fn of_meminfo(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Lists the control groups that may limit this process's memory: its own, and those around it as far up as they are
/// mounted.
fn groups(read: Read<'_>) -> Vec<(Version, PathBuf)> {
    let text = |path| read(Path::new(path)).unwrap_or_default();
    let (own, mounts) = (text("/proc/self/cgroup"), text("/proc/self/mountinfo"));
    let mounts: Vec<Mount> = mounts.lines().filter_map(Mount::parse).collect();
    let mut groups = Vec::new();
    for line in own.lines() {
        // A line has a number, the controllers and a path.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let version = match controllers {
            "" => Version::Two,
            list if list.split(',').any(|name| name == "memory") => Version::One,
            _ => continue,
        };
        let Some(mount) = mounts.iter().find(|mount| mount.version == version) else {
            continue;
        };
        // A group outside the mounted part is limited at least by the top of the mount.
        let below = Path::new(path).strip_prefix(&mount.root);
        let own = mount.point.join(below.unwrap_or(Path::new("")));
        let around = own.ancestors().take_while(|g| g.starts_with(&mount.point));
        groups.extend(around.map(|group| (version, group.to_owned())));
    }
    groups
}

/// A mounted hierarchy of control groups with the memory controller.
struct Mount {
    version: Version,
    /// The group at the top of the mount.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// Parses a line of mountinfo, if it mounts such a hierarchy. A line has numbers, root, mount point, options,
    /// optional fields, a dash, type, source and the options of the type.
    fn parse(line: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3).map(unescaped);
        let mut kind = kind.split(' ');
        let version = match kind.next()? {
            "cgroup2" => Version::Two,
            "cgroup" if kind.nth(1)?.split(',').any(|o| o == "memory") => Version::One,
            _ => return None,
        };
        Some(Self {
            version,
            root: place.next()?,
            point: place.next()?,
        })
    }
}

/// Decodes a path of mountinfo, which writes space, tab, line feed and backslash as three octal digits.
fn unescaped(path: &str) -> PathBuf {
    let escapes = [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ];
    let plain = |path: String, (escape, plain): (&str, &str)| path.replace(escape, plain);
    escapes.into_iter().fold(path.to_owned(), plain).into()
}

/// The version of the control groups. The names of their files differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// Returns the rest of a group's limit, if it has one.
    fn left(self, read: Read<'_>, group: &Path) -> Option<u64> {
        let (limit, used, prefix) = match self {
            Self::One => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
            Self::Two => ("memory.max", "memory.current", ""),
        };
        let number = |name| read(&group.join(name))?.trim().parse::<u64>().ok();
        let (limit, used) = (number(limit)?, number(used)?);
        // File pages count as used, but the kernel frees them when memory is needed.
        let stat = read(&group.join("memory.stat")).unwrap_or_default();
        let files: u64 = stat
            .lines()
            .filter_map(|line| line.strip_prefix(prefix)?.split_once(' '))
            .filter(|(name, _)| ["inactive_file", "active_file"].contains(name))
            .filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok())
            .sum();
        Some(limit.saturating_sub(used.saturating_sub(files)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_the_kernel() {
        assert!(available_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn the_right_line_is_read_in_the_right_unit() {
        let text = "MemTotal:  24 kB\nMemFree: 1 kB\nMemAvailable:   17 kB\n";
        assert_eq!(of_meminfo(text), Some(17 * 1024));
        assert_eq!(of_meminfo("MemTotal: 24 kB\n"), None);
        assert_eq!(of_meminfo("MemAvailable: many kB\n"), None);
    }

    const TWO: &str = "22 1 0:1 / / rw - ext4 /dev/x rw\n\
        30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const ONE: &str = "33 32 0:29 / /sys/fs/cgroup/cpu rw shared:15 - cgroup cgroup rw,cpu\n\
        34 32 0:30 /docker/a\\040b /mem rw - cgroup cgroup rw,memory\n";

    /// What is available of 1000 KiB to a process in these groups, under these mounts.
    #[track_caller]
    fn assert_left(own: &str, mounts: &str, files: &[(&str, &str)], wanted: u64) {
        let system = [
            ("/proc/meminfo", "MemAvailable: 1000 kB\n"),
            ("/proc/self/cgroup", own),
            ("/proc/self/mountinfo", mounts),
        ];
        let read = |path: &Path| {
            let mut all = system.iter().chain(files);
            let found = all.find(|(name, _)| Path::new(name) == path);
            found.map(|(_, text)| (*text).to_owned())
        };
        assert_eq!(available_by(&read), Some(wanted));
    }

    #[test]
    fn a_group_without_a_limit_changes_nothing() {
        assert_left("", "", &[], 1_024_000);
        assert_left("0::/a\n", "", &[], 1_024_000);
        let unlimited = [
            ("/sys/fs/cgroup/a/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/memory.current", "5\n"),
        ];
        assert_left("0::/a\n", TWO, &unlimited, 1_024_000);
    }

    #[test]
    fn the_least_that_any_group_around_the_process_has_left_counts() {
        let own = [
            ("/sys/fs/cgroup/user/a/memory.max", "5000\n"),
            ("/sys/fs/cgroup/user/a/memory.current", "3000\n"),
            // Pages of files are given back.
            (
                "/sys/fs/cgroup/user/a/memory.stat",
                "anon 7\ninactive_file 200\nactive_file 300\nfile 500\n",
            ),
        ];
        assert_left("0::/user/a\n", TWO, &own, 2500);
        let around = [
            ("/sys/fs/cgroup/user/memory.max", "6000\n"),
            ("/sys/fs/cgroup/user/memory.current", "5500\n"),
        ];
        let both = [&own[..], &around].concat();
        assert_left("0::/user/a\n", TWO, &both, 500);
        let top = [
            ("/sys/fs/cgroup/memory.max", "900\n"),
            ("/sys/fs/cgroup/memory.current", "1000\n"),
        ];
        assert_left("0::/\n", TWO, &top, 0);
    }

    #[test]
    fn version_one_is_read_as_far_as_it_is_mounted() {
        let groups = "5:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/a b/job\n0::/\n";
        let files = [
            ("/mem/job/memory.limit_in_bytes", "7000\n"),
            ("/mem/job/memory.usage_in_bytes", "900\n"),
            (
                "/mem/job/memory.stat",
                "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 0\n",
            ),
            ("/mem/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/mem/memory.usage_in_bytes", "900\n"),
        ];
        assert_left(groups, ONE, &files, 6200);
        // A group outside of what is mounted is seen through its top.
        let top = [
            ("/mem/memory.limit_in_bytes", "4000\n"),
            ("/mem/memory.usage_in_bytes", "1000\n"),
        ];
        assert_left("4:memory:/elsewhere\n", ONE, &top, 3000);
    }
}
