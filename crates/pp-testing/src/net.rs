//! Two hosts on one machine: a network namespace for each, a cable between them, and the cut.
//!
//! The namespaces have no names. Each is held open by a process that ends when this one does, so
//! nothing is left of them whatever happens here.

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What the cable's ends are called in their namespaces.
pub const DEVICE: &str = "pp0";
/// Their addresses.
pub const ADDRESSES: [&str; 2] = ["10.77.77.1", "10.77.77.2"];

/// Two joined namespaces, one for each host.
#[derive(Debug)]
pub struct Net {
    holders: [Child; 2],
    /// Who is not root makes a user namespace first, in which it is.
    in_user: bool,
}

impl Net {
    /// Makes them.
    ///
    /// # Errors
    /// Why this is not possible here.
    pub fn new() -> Result<Self, String> {
        Self::make(false).or_else(|_| Self::make(true))
    }

    fn make(in_user: bool) -> Result<Self, String> {
        let mut unshare = Command::new("unshare");
        let mut beside = Command::new("unshare");
        if in_user {
            unshare.args(["--user", "--map-root-user"]);
        }
        let first = hold(unshare.args(["--net", "cat"]))?;
        if in_user {
            beside = inside(&first, &["user"], "unshare");
        }
        let second = hold(beside.args(["--net", "cat"]))?;
        let net = Self {
            holders: [first, second],
            in_user,
        };
        let other = net.holders[1].id();
        let [one, two] = ADDRESSES;
        net.configure(
            0,
            &format!(
                "link add {DEVICE} type veth peer name pp1\n\
                 link set pp1 netns {other}\n\
                 addr add {one}/30 dev {DEVICE}\nlink set {DEVICE} up\nlink set lo up\n"
            ),
        )?;
        net.configure(
            1,
            &format!(
                "link set pp1 name {DEVICE}\naddr add {two}/30 dev {DEVICE}\n\
                 link set {DEVICE} up\nlink set lo up\n"
            ),
        )?;
        Ok(net)
    }

    /// A program on a host, under the process id that it is started with. Each host has a name of its own: NCCL takes ranks
    /// with the same one for neighbours, and goes around the network.
    pub fn command(&self, host: usize, program: &OsStr) -> Command {
        with_name(self.inside(host, "unshare"), host, program)
    }

    fn inside(&self, host: usize, program: &str) -> Command {
        let kinds = ["user", "net"];
        let kinds = &kinds[usize::from(!self.in_user)..];
        inside(&self.holders[host], kinds, program)
    }

    /// Takes the cable out: from now on nothing that one host sends comes to the other, and neither is told.
    ///
    /// # Errors
    /// Why this is not possible.
    pub fn cut(&self) -> Result<(), String> {
        self.configure(0, &format!("link set {DEVICE} down\n"))
    }

    fn configure(&self, host: usize, lines: &str) -> Result<(), String> {
        let mut command = self.inside(host, "ip");
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
        Err(format!("no network of its own for a host: {first}"))
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

/// Says whether a host can have more than one name here.
pub fn can_name_hosts() -> bool {
    unshare_names().is_some()
}

/// A program for which this host has another name: NCCL refuses two ranks on one GPU only if their hosts have the same. It has
/// the process id that it is started with. Where hosts cannot be named it does not start.
pub fn on_named_host(number: usize, program: &OsStr) -> Command {
    let mut unshare = Command::new("unshare");
    unshare.args(unshare_names().unwrap_or_default());
    with_name(unshare, number, program)
}

/// What `unshare` is to be told before a process can name its host; `None` if nothing helps.
fn unshare_names() -> Option<&'static [&'static str]> {
    static FOUND: OnceLock<Option<&[&str]>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let ways: [&[&str]; 2] = [&[], &["--user", "--map-root-user"]];
        ways.into_iter().find(|way| {
            let mut unshare = Command::new("unshare");
            unshare.args(*way).args(["--uts", "hostname", "pp-host"]);
            let ended = unshare.stderr(Stdio::null()).status();
            ended.is_ok_and(|ended| ended.success())
        })
    })
}

/// The program starts only if its host got its name.
fn with_name(mut unshare: Command, host: usize, program: &OsStr) -> Command {
    unshare
        .args([
            "--uts",
            "sh",
            "-c",
            "hostname \"pp-host-$0\" && exec \"$@\"",
        ])
        .arg(host.to_string())
        .arg(program);
    unshare
}

/// A program in these namespaces of a process.
fn inside(holder: &Child, kinds: &[&str], program: &str) -> Command {
    let mut command = Command::new("nsenter");
    for kind in kinds {
        command.arg(format!("--{kind}=/proc/{}/ns/{kind}", holder.id()));
    }
    if kinds.contains(&"user") {
        command.arg("--preserve-credentials");
    }
    command.arg("--").arg(program);
    command
}

/// Starts a process in a new network namespace, which ends when its input does.
fn hold(command: &mut Command) -> Result<Child, String> {
    let own = std::fs::read_link("/proc/self/ns/net").map_err(|e| e.to_string())?;
    let piped = command.stdin(Stdio::piped());
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
