//! Two hosts on one machine: a network namespace for each rank, a cable between them, and the cut.
//!
//! The namespaces have no names. Each is held open by a process that ends when this one does, so
//! nothing is left of them whatever happens here.

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What the cable's ends are called in their namespaces.
pub(super) const DEVICE: &str = "pp0";
/// The address of rank 0.
pub(super) const ADDRESS: &str = "10.77.77.1";

/// Two joined namespaces, one for each rank.
pub(super) struct Net {
    holders: [Child; 2],
}

impl Net {
    /// Makes them.
    ///
    /// # Errors
    /// Why this is not possible here.
    pub(super) fn new() -> Result<Self, String> {
        let net = Self {
            holders: [hold()?, hold()?],
        };
        let other = net.holders[1].id();
        net.configure(
            0,
            &format!(
                "link add {DEVICE} type veth peer name pp1\n\
                 link set pp1 netns {other}\n\
                 addr add {ADDRESS}/30 dev {DEVICE}\nlink set {DEVICE} up\nlink set lo up\n"
            ),
        )?;
        net.configure(
            1,
            &format!(
                "link set pp1 name {DEVICE}\naddr add 10.77.77.2/30 dev {DEVICE}\n\
                 link set {DEVICE} up\nlink set lo up\n"
            ),
        )?;
        Ok(net)
    }

    /// A rank's program, which will run in its namespace under the process id it is started with.
    /// It has a host name of its own, where one can be had: NCCL takes ranks with the same one for
    /// neighbours, and goes around the network.
    pub(super) fn command(&self, rank: usize, program: &OsStr) -> Command {
        let mut command = self.inside(rank, "unshare".as_ref());
        command
            .args(["--uts", "sh", "-c"])
            .arg("{ echo \"pp-rank-$0\" >/proc/sys/kernel/hostname; } 2>/dev/null; exec \"$@\"")
            .arg(rank.to_string())
            .arg(program);
        command
    }

    fn inside(&self, rank: usize, program: &OsStr) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(self.flag(rank)).arg("--").arg(program);
        command
    }

    /// Takes the cable out: from now on nothing that one rank sends comes to the other, and neither
    /// is told.
    pub(super) fn cut(&self) -> Result<(), String> {
        self.configure(0, &format!("link set {DEVICE} down\n"))
    }

    fn flag(&self, rank: usize) -> String {
        format!("--net=/proc/{}/ns/net", self.holders[rank].id())
    }

    fn configure(&self, rank: usize, lines: &str) -> Result<(), String> {
        let mut command = self.inside(rank, "ip".as_ref());
        let piped = command.args(["-batch", "-"]).stdin(Stdio::piped());
        let piped = piped.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = piped.spawn().map_err(|e| format!("nsenter: {e}"))?;
        if let Some(mut stdin) = child.stdin.take() {
            // A program that does not read says why.
            let _ = stdin.write_all(lines.as_bytes());
        }
        let output = child.wait_with_output().map_err(|e| e.to_string())?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().next().unwrap_or("ip failed without a word");
        Err(format!("no network of its own for a rank: {first}"))
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for holder in &mut self.holders {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

/// A process in a new network namespace, which ends when its input does.
fn hold() -> Result<Child, String> {
    let own = std::fs::read_link("/proc/self/ns/net").map_err(|e| e.to_string())?;
    let mut command = Command::new("unshare");
    let piped = command.args(["--net", "cat"]).stdin(Stdio::piped());
    let piped = piped.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = piped.spawn().map_err(|e| format!("unshare: {e}"))?;
    let place = format!("/proc/{}/ns/net", child.id());
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        if std::fs::read_link(&place).is_ok_and(|found| found != own) {
            return Ok(child);
        }
        let refused = child.try_wait().ok().flatten().is_some();
        if refused || Instant::now() > deadline {
            let _ = child.kill();
            let output = child.wait_with_output().map_err(|e| e.to_string())?;
            let said = String::from_utf8_lossy(&output.stderr);
            let first = said.lines().next().unwrap_or("unshare did nothing");
            return Err(format!("no network namespace can be made here: {first}"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
