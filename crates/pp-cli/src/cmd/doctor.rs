//! `pp doctor`: what this machine has and lacks, and what to do about each.

use std::fmt;
use std::process::Command;

use pp_command::env::Env;
use pp_command::print_result;
use pp_contract::Rank;
use pp_contract::{VideoPlan, WIRE_VERSION, plan_digest, with_source};
use pp_device::{Device, Reach};
use pp_kernels::KernelSet;
use pp_transport::bell::Bell;
use pp_transport::gpu::try_to_lock;
use pp_transport::host::memory::available_bytes;
use pp_transport::host::{EdgeShape, Host};
use pp_transport::launch::Launch;
use pp_transport::nccl::{Nccl, uuid_text};
use serde::Serialize;

use pp_job::Error;

/// What was found of one thing.
enum Finding {
    Good(String),
    /// Works, but less well than it could.
    Note(String, &'static str),
    Bad(String, &'static str),
}
use Finding::{Bad, Good, Note};

/// What was found, as `doctor` prints it.
#[derive(Serialize)]
struct Diagnosis {
    /// `pp` can run here.
    works: bool,
    findings: Vec<Diagnosed>,
}

/// A finding about one thing: "good", "note" or "bad", and the remedy where it is not good.
#[derive(Serialize)]
struct Diagnosed {
    name: &'static str,
    state: &'static str,
    what: String,
    remedy: Option<&'static str>,
}

impl Diagnosed {
    fn of((name, finding): (&'static str, Finding)) -> Self {
        let (state, what, remedy) = match finding {
            Good(what) => ("good", what, None),
            Note(what, remedy) => ("note", what, Some(remedy)),
            Bad(what, remedy) => ("bad", what, Some(remedy)),
        };
        Self {
            name,
            state,
            what,
            remedy,
        }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for found in &self.findings {
            let (name, what) = (found.name, &found.what);
            match (found.state, found.remedy) {
                ("bad", Some(remedy)) => writeln!(f, "BAD   {name:<14} {what}; {remedy}")?,
                (_, Some(remedy)) => writeln!(f, "note  {name:<14} {what}; {remedy}")?,
                (_, None) => writeln!(f, "ok    {name:<14} {what}")?,
            }
        }
        match self.works {
            true => writeln!(
                f,
                "`pp run` works here; --transport auto says what it chooses"
            ),
            false => Ok(()),
        }
    }
}

/// Prints each finding, with the remedy where there is one.
pub(crate) fn doctor(json: bool, env: &Env) -> Result<(), Error> {
    let findings = [
        ("cores", cores()),
        ("simd", simd()),
        ("memory", memory()),
        ("shared memory", shared_memory()),
        ("usable cores", affinity()),
        ("launcher", launcher(env)),
        ("gpus", gpus()),
        ("nccl", nccl()),
        ("kernels", kernels()),
        ("ffmpeg", ffmpeg()),
    ];
    let findings: Vec<_> = findings.into_iter().map(Diagnosed::of).collect();
    let bad = findings.iter().filter(|found| found.state == "bad").count();
    let diagnosis = Diagnosis {
        works: bad == 0,
        findings,
    };
    print_result(&diagnosis, json)?;
    if bad > 0 {
        let findings = if bad == 1 { "finding" } else { "findings" };
        return Err(Error::Other(anyhow::anyhow!(
            "{bad} {findings} marked BAD above: pp cannot run here"
        )));
    }
    Ok(())
}

/// What ranks compare before they begin: on two machines these must be the same.
fn kernels() -> Finding {
    let digest = |set: KernelSet| {
        let about = set.describe();
        format!("{} {:016x}", about.name, about.digest)
    };
    let fields = plan_digest::<VideoPlan>();
    let sets: Vec<_> = KernelSet::built_in().map(digest).collect();
    let sets = sets.join(", ");
    Good(format!(
        "{sets}; plan {fields:016x}; wire version {WIRE_VERSION}"
    ))
}

fn cores() -> Finding {
    match std::thread::available_parallelism().map_or(1, usize::from) {
        1 => Note(
            "1".into(),
            "all ranks share it, so nothing overlaps; use a core for each rank",
        ),
        n => Good(format!("{n}")),
    }
}

fn simd() -> Finding {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return Good("AVX-512".into());
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Good("AVX2 and FMA".into());
        }
    }
    if cfg!(target_arch = "aarch64") {
        return Good("NEON".into());
    }
    Note(
        "no AVX2 and no NEON".into(),
        "the CPU kernels run their portable version, several times slower",
    )
}

fn memory() -> Finding {
    // The default job on 1280x720 video: 8 slots of 11 MB, a recorder, the kernels' planes.
    const WANTED_MIB: u64 = 512;
    match available_bytes().map(|bytes| bytes >> 20) {
        None => Note("unknown".into(), "the kernel does not say"),
        Some(mib) if mib < WANTED_MIB => Note(
            format!("{mib} MiB available"),
            "use a smaller --depth and --frames-per-chunk",
        ),
        Some(mib) => Good(format!("{mib} MiB available")),
    }
}

fn shared_memory() -> Finding {
    let edge = EdgeShape {
        depth: 2,
        slot_bytes: 1 << 20,
    };
    let [a, b] = [Rank::new(0), Rank::new(1)];
    let made = Bell::new().and_then(|bell| Host::pair(edge, (a, &bell), (b, &bell)).map(drop));
    match made {
        Ok(()) => Good("sealed memfd regions can be made and mapped".into()),
        Err(error) => Bad(
            format!("{error}"),
            "allow memfd_create and more memory in this container",
        ),
    }
}

fn affinity() -> Finding {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) if set.count() < 2 => Note(
            "this process may use one core only".into(),
            "all ranks inherit that; lift it with taskset or the container's cpuset",
        ),
        Ok(set) => Good(format!("this process may use {} cores", set.count())),
        Err(error) => Note(format!("unknown ({error})"), "nothing to do"),
    }
}

fn launcher(env: &Env) -> Finding {
    match Launch::from_env(|name| env.text(name)) {
        Ok(None) => Good("none: pp starts its own ranks".into()),
        Ok(Some(launch)) => Good(format!(
            "{:?}: rank {} of {}",
            launch.launcher(),
            launch.rank(),
            launch.world_size()
        )),
        Err(error) => Bad(
            with_source(&error),
            "fix the environment, or unset it to let pp start its own ranks",
        ),
    }
}

fn gpus() -> Finding {
    let count = match Device::count() {
        Ok(count) => count,
        Err(error) => {
            return Note(
                with_source(&error),
                "without it pp runs on shared memory and CPU kernels",
            );
        }
    };
    let (mut names, mut devices) = (Vec::new(), Vec::new());
    for ordinal in 0..count {
        match Device::open(ordinal) {
            Ok(device) => {
                let about = device.about();
                names.push(format!(
                    "{} ({}, compute {}.{}, {} MiB, driver for CUDA {}.{}, {} MPS)",
                    about.name,
                    uuid_text(about.uuid),
                    about.compute_major,
                    about.compute_minor,
                    about.total_bytes >> 20,
                    about.driver_version / 1000,
                    about.driver_version % 1000 / 10,
                    if about.has_mps { "under" } else { "without" }
                ));
                devices.push(device);
            }
            Err(error) => {
                return Bad(
                    format!("GPU {ordinal}: {}", with_source(&error)),
                    "see what nvidia-smi says of it, or hide it with CUDA_VISIBLE_DEVICES",
                );
            }
        }
    }
    // Eight slots of 8 MiB.
    if let Some(Err(error)) = devices.first().map(|gpu| try_to_lock(gpu, 64 << 20)) {
        let why = with_source(&error);
        names.push(format!(
            "64 MiB of shared memory cannot be page-locked: {why}"
        ));
        return Note(
            names.join(", "),
            "edges between a CPU and a GPU (--devices cpu,cuda:0) may fail: raise the limit of locked memory (ulimit -l), or the \
             memory of the container",
        );
    }
    match names.len() {
        0 => Note("a driver and no GPU".into(), "check CUDA_VISIBLE_DEVICES"),
        1 if devices[0].about().has_mps => Good(names.join(", ")),
        1 => Note(
            names.join(", "),
            "pp run puts one rank on it; ranks that share it (--devices cuda:0,cuda:0) take turns; to let their work \
             overlap, start NVIDIA's MPS: nvidia-cuda-mps-control -d",
        ),
        _ => Good(format!("{}; {}", names.join(", "), between(&devices))),
    }
}

/// How each two of several GPUs reach each other.
fn between(devices: &[Device]) -> String {
    let mut pairs = Vec::new();
    for (at, low) in devices.iter().enumerate() {
        for high in &devices[at + 1..] {
            let how = match low.reach(high.about().uuid) {
                Ok(Reach::NvLink) => "NVLink".to_owned(),
                Ok(Reach::Bus) => "the bus".to_owned(),
                Ok(_) => "neither reaches the other".to_owned(),
                Err(error) => with_source(&error),
            };
            let (low, high) = (low.about().ordinal, high.about().ordinal);
            pairs.push(format!("between {low} and {high}: {how}"));
        }
    }
    pairs.join(", ")
}

fn nccl() -> Finding {
    match Nccl::load() {
        Ok(nccl) => {
            // Of what may be missing, this is the one whose lack is felt.
            let missing = if nccl.functions().ncclCommRevoke.is_none() {
                ", without ncclCommRevoke: aborts are less gentle on the peers"
            } else {
                ""
            };
            Good(format!(
                "{} from {}{missing}",
                nccl.version(),
                nccl.path().display()
            ))
        }
        Err(error) => Note(
            with_source(&error),
            "needed on GPUs without NVLink between them, on several machines, and for groups of ranks",
        ),
    }
}

fn ffmpeg() -> Finding {
    match Command::new("ffmpeg").arg("-version").output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            Good(text.lines().next().unwrap_or("present").to_owned())
        }
        _ => Note(
            "not found".into(),
            "needed only to convert to and from Y4M: apt-get install ffmpeg",
        ),
    }
}
