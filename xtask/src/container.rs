//! `cargo xtask everything container`: the steps of `Containerfile` in bare Debian roots, and `pp` in the last of them.
//!
//! Two roots come from debootstrap, one for each stage. The first has the Rust toolchain of this machine, as the image that
//! the stage names has one. Packages come from the mirror of debootstrap; names, proxies and certificates are those of this machine. It
//! needs the rights of root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{command, output, root, run, target};

/// The name of Debian's release in an image such as `rust:1.95-slim-bookworm`.
const RELEASE: &str = "bookworm";

/// One line of a container file: the instruction, and the text behind it.
type Step = (String, String);

/// The steps of each stage, without comments. Lines that end in a backslash go on in the next.
fn stages(text: &str) -> Result<Vec<Vec<Step>>> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let joined = lines.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    let mut stages = Vec::new();
    for line in joined
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
    {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "FROM" => stages.push(Vec::new()),
            "RUN" | "WORKDIR" | "COPY" | "ENV" | "ENTRYPOINT" => {}
            _ => bail!("Containerfile: no step is called {word:?}"),
        }
        let stage = stages
            .last_mut()
            .context("Containerfile: it begins without FROM")?;
        stage.push((word.to_owned(), rest.to_owned()));
    }
    Ok(stages)
}

/// A folder that is the root of the commands of one stage.
struct Root {
    at: PathBuf,
    /// Where commands begin.
    folder: String,
    env: Vec<String>,
}

impl Root {
    /// Makes a bare Debian of what the stage is built from.
    fn make(at: PathBuf, image: &str) -> Result<Self> {
        ensure!(
            image.contains(RELEASE),
            "Containerfile: FROM {image}: an image of Debian {RELEASE} is tested"
        );
        let mut bootstrap = command("debootstrap");
        let bare = bootstrap.args(["--variant=minbase", RELEASE]).arg(&at);
        run(bare).context("debootstrap comes with apt-get install debootstrap")?;
        let mut env =
            vec!["PATH=/usr/local/cargo/bin:/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin".into()];
        let proxies = ["http_proxy", "https_proxy", "no_proxy"].into_iter();
        env.extend(
            proxies.filter_map(|name| Some(format!("{name}={}", std::env::var(name).ok()?))),
        );
        let root = Self {
            at,
            folder: "/".into(),
            env,
        };
        // The sources of packages are not: those of others want keys that are not in it, and those of another release do not fit.
        root.take(Path::new("/etc/resolv.conf"), "etc/resolv.conf")?;
        Ok(root)
    }

    /// Puts a file or folder into it.
    fn take(&self, from: &Path, to: &str) -> Result<()> {
        let to = self.at.join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap_or(&self.at))?;
        // The names of this machine may be a link to a file that is not in it.
        run(command("cp").args(["-a", "-H", "-T"]).arg(from).arg(to))
    }

    /// The toolchain that the image with Rust has.
    fn take_rust(&self) -> Result<()> {
        let sysroot = output(command("rustc").args(["--print", "sysroot"]))?;
        self.take(Path::new(sysroot.trim()), "usr/local/cargo")
    }

    /// A command in it, with these variables alone.
    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut inside = command("unshare");
        inside.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c"]);
        let enter = "mount -t proc proc \"$0/proc\" && mount --bind /dev \"$0/dev\" && at=$1 && shift && \
                     exec chroot \"$0\" env -i -C \"$at\" \"$@\"";
        inside
            .arg(enter)
            .arg(&self.at)
            .arg(&self.folder)
            .args(&self.env);
        inside.arg(program).args(args);
        inside
    }

    /// Does a step; `others` are the stages before.
    fn step(&mut self, (word, text): &Step, others: &[(String, Self)]) -> Result<()> {
        match &**word {
            "RUN" => run(&mut self.command("sh", &["-c", text])),
            "WORKDIR" => {
                self.folder.clone_from(text);
                Ok(fs::create_dir_all(
                    self.at.join(text.trim_start_matches('/')),
                )?)
            }
            "ENV" => {
                self.env.extend(text.split(' ').map(str::to_owned));
                Ok(())
            }
            "COPY" => match text.split(' ').collect::<Vec<_>>()[..] {
                [".", "."] => self.take_sources(),
                [from, source, to] => {
                    let name = from
                        .strip_prefix("--from=")
                        .context("COPY takes --from=STAGE")?;
                    let other = others.iter().find(|(other, _)| other == name);
                    let (_, other) = other.with_context(|| format!("no stage is called {name}"))?;
                    self.take(&other.at.join(source.trim_start_matches('/')), to)
                }
                _ => bail!(
                    "Containerfile: COPY {text}: only '. .' and '--from=STAGE FILE FILE' are tested"
                ),
            },
            _ => Ok(()),
        }
    }

    /// What git knows of this tree, as it is now.
    fn take_sources(&self) -> Result<()> {
        let to = self.at.join(self.folder.trim_start_matches('/'));
        let copy = "git -c safe.directory='*' ls-files -z --cached --others --exclude-standard | \
                    tar --null --files-from=- --create --file=- | tar --extract --file=- --directory \"$0\"";
        run(command("sh").args(["-c", copy]).arg(to))
    }
}

/// Builds the image and runs `pp` in it.
pub(crate) fn check() -> Result<()> {
    let text = fs::read_to_string(root().join("Containerfile"))?;
    let at = target()?.join("container");
    if at.exists() {
        fs::remove_dir_all(&at)?;
    }
    fs::create_dir_all(&at)?;
    let mut made: Vec<(String, Root)> = Vec::new();
    for (number, stage) in stages(&text)?.iter().enumerate() {
        let from = &stage[0].1;
        let (image, name) = from.split_once(" AS ").unwrap_or((from, ""));
        let mut bare = Root::make(at.join(number.to_string()), image)?;
        if image.starts_with("rust:") {
            bare.take_rust()?;
        }
        trust(&mut bare)?;
        for step in &stage[1..] {
            bare.step(step, &made)
                .with_context(|| format!("{} {}", step.0, step.1))?;
        }
        made.push((name.to_owned(), bare));
    }
    let (_, image) = made.last().context("Containerfile: it has no stage")?;
    let clip = crate::clip::expanded()?;
    image.take(&clip, "videos/in.y4m")?;
    run(&mut image.command("pp", &["doctor"]))?;
    let args = "run --input in.y4m --output out.y4m --ranks 2 --chunks 4 --transport host";
    run(&mut image.command("pp", &args.split(' ').collect::<Vec<_>>()))?;
    ensure!(
        image.at.join("videos/out.y4m").exists(),
        "pp wrote no video"
    );
    Ok(fs::remove_dir_all(at)?)
}

/// Lets what runs in the root trust whom this machine trusts, where that is named.
fn trust(bare: &mut Root) -> Result<()> {
    let Some(certificates) = std::env::var_os("SSL_CERT_FILE") else {
        return Ok(());
    };
    bare.take(Path::new(&certificates), "certificates.crt")?;
    let names = ["SSL_CERT_FILE", "CARGO_HTTP_CAINFO", "PIP_CERT"];
    bare.env
        .extend(names.map(|name| format!("{name}=/certificates.crt")));
    Ok(())
}

/// `cargo xtask everything install`: `cargo install`, and the program in an empty folder with an empty environment.
pub(crate) fn install() -> Result<()> {
    let at = target()?.join("installed");
    let mut install = crate::process::cargo("install --locked --path crates/pp-cli --force --root");
    run(install.arg(&at))?;
    let empty = at.join("empty");
    if empty.exists() {
        fs::remove_dir_all(&empty)?;
    }
    fs::create_dir_all(&empty)?;
    let clip = crate::clip::expanded()?;
    let started = || {
        let mut pp = Command::new(at.join("bin/pp"));
        pp.env_clear().current_dir(&empty);
        pp
    };
    run(started().arg("doctor"))?;
    let args = "run --output out.y4m --ranks 2 --chunks 4 --input";
    run(started().args(args.split(' ')).arg(clip))?;
    ensure!(empty.join("out.y4m").exists(), "pp wrote no video");
    Ok(fs::remove_dir_all(at)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packages behind these words on a line.
    fn packages<'a>(line: &'a str, behind: &str) -> Vec<&'a str> {
        let rest = line.split(behind).nth(1).unwrap_or_default();
        let end = rest.find([')', '&']).unwrap_or(rest.len());
        rest[..end].split_whitespace().collect()
    }

    #[test]
    fn every_step_of_the_containerfile_is_known_and_builds_with_the_packages_of_the_gate() {
        let read = |name: &str| fs::read_to_string(root().join(name)).unwrap();
        let stages = stages(&read("Containerfile")).unwrap();
        let [build, last] = &stages[..] else {
            panic!("{} stages", stages.len());
        };
        assert_eq!(last.last().unwrap().0, "ENTRYPOINT");
        let installs = |stage: &[Step]| {
            let step = stage
                .iter()
                .find(|(_, text)| text.contains("apt-get install"));
            packages(&step.unwrap().1, "--no-install-recommends").join(" ")
        };
        let gate = read(".ci/run");
        let compiler = gate.lines().find(|line| line.starts_with("command -v cc"));
        assert_eq!(
            installs(build),
            packages(compiler.unwrap(), "missing+=(").join(" ")
        );
        let python = installs(last);
        let has_python = |line: &&str| line.contains("-m pip --version");
        let wanted = gate.lines().find(has_python).unwrap();
        assert!(
            python.ends_with(&packages(wanted, "missing+=(").join(" ")),
            "{python}"
        );
        let version = read("Cargo.toml");
        let version = version
            .lines()
            .find_map(|line| line.strip_prefix("rust-version = "));
        let image = format!(
            "rust:{}-slim-{RELEASE} AS build",
            version.unwrap().trim_matches('"')
        );
        assert_eq!(build[0].1, image);
        assert!(super::stages("FROM a\nEXPOSE 1").is_err());
    }
}
