//! The variables of each launcher, read into a place.

use pp_contract::{Rank, WorldSize};

use super::error::LaunchError;
use super::place::{Address, Env, Launcher, Via};
use super::{JobSecret, Launch};

/// Ports from here on, 20,000 of them, are derived from a job's id: above the well-known ones and
/// below those that Linux gives to outgoing connections (32768 and up).
const FIRST_DERIVED_PORT: u64 = 10_000;
const DERIVED_PORTS: u64 = 20_000;
/// Longest value repeated in an error.
const SHOWN_CHARS: usize = 80;

/// The names one launcher uses.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    /// The first that is set counts.
    size: &'static [&'static str],
    local_rank: &'static str,
    how: &'static str,
}

const TORCHRUN: Names = Names {
    launcher: Launcher::Torchrun,
    rank: "RANK",
    size: &["WORLD_SIZE"],
    local_rank: "LOCAL_RANK",
    how: "torchrun sets both; start all ranks with it, or unset both to let pp start its own",
};
const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    size: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    how: "mpirun sets both; start all ranks with it, or unset both to let pp start its own",
};
const SLURM: Names = Names {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    how: "srun sets both; start the ranks with srun",
};

impl Launch {
    /// Reads the place from a launcher's variables; `Ok(None)` when there is no launcher.
    ///
    /// `env` looks a variable up: `|name| std::env::var(name).ok()` in a program. The only other
    /// thing read is the file named by `PP_JOB_SECRET_FILE`.
    ///
    /// # Errors
    /// Variables are half set, contradict each other, or hold what cannot be; or there is no
    /// usable secret.
    pub fn from_env(env: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, LaunchError> {
        place(&Env::new(&env))
    }

    /// How many ranks the launcher started; `Ok(None)` when there is no launcher. Looks at nothing else.
    ///
    /// # Errors
    /// The number of ranks is missing, or cannot be.
    pub fn world_from_env(
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<WorldSize>, LaunchError> {
        world_size(&Env::new(&env))
    }
}

/// The launcher that started this process, with the number of ranks and the variable that says it.
fn world(env: &Env<'_>) -> Result<Option<(Names, &'static str, WorldSize)>, LaunchError> {
    let names = if env.first(&["RANK", "WORLD_SIZE"]).is_some() {
        TORCHRUN
    } else if env.first(&[OPEN_MPI.rank, OPEN_MPI.size[0]]).is_some() {
        OPEN_MPI
    } else if env.get(SLURM.rank).is_some() && is_slurm_step(env) {
        SLURM
    } else {
        return Ok(None);
    };
    let (size_name, world_size) = match env.first(names.size) {
        Some((name, value)) => (name, number::<u32>(name, &value, names.how)?),
        None => return Err(missing(env, names.rank, names.size[0], names.how)),
    };
    let world_size = WorldSize::new(world_size)
        .map_err(|error| bad(size_name, "0", &error.to_string(), names.how))?;
    Ok(Some((names, size_name, world_size)))
}

/// How many ranks the launcher started, if there is one.
pub(super) fn world_size(env: &Env<'_>) -> Result<Option<WorldSize>, LaunchError> {
    Ok(world(env)?.map(|(_, _, size)| size))
}

/// The place of this process, if there is a launcher.
pub(super) fn place(env: &Env<'_>) -> Result<Option<Launch>, LaunchError> {
    // A wrong value is refused without a launcher, too.
    let via = via(env)?;
    let Some((names, size_name, world_size)) = world(env)? else {
        return Ok(None);
    };
    let Some(rank_text) = env.get(names.rank) else {
        return Err(missing(env, size_name, names.rank, names.how));
    };
    let rank = number::<u32>(names.rank, &rank_text, names.how)?;
    if !world_size.contains(Rank::new(rank)) {
        return Err(LaunchError::new(
            format!("{}={rank} contradicts {size_name}={world_size}", names.rank),
            format!("ranks of this world go from 0 to {}", world_size.get() - 1),
        ));
    }
    let local_rank = match env.get(names.local_rank) {
        Some(value) => number(names.local_rank, &value, names.how)?,
        None => rank,
    };
    // Open MPI does not number the ranks of a host in the order of their ranks.
    if local_rank >= world_size.get() {
        return Err(LaunchError::new(
            format!(
                "{}={local_rank} contradicts {size_name}={world_size}",
                names.local_rank
            ),
            "it counts the ranks of one host, from 0; give each process of a host its own",
        ));
    }
    let address = match via {
        Via::Unix => None,
        Via::Auto | Via::Tcp => Some(address(env, &names, world_size)?),
    };
    Ok(Some(Launch {
        secret: JobSecret::from_env(env, names.launcher)?,
        launcher: names.launcher,
        // RANK and WORLD_SIZE alone may come from a program that starts one rank again.
        is_all_or_none: names.launcher != Launcher::Torchrun
            || env.get("TORCHELASTIC_RUN_ID").is_some(),
        rank: Rank::new(rank),
        world_size,
        local_rank,
        job_id: job_id(env, names.launcher),
        address,
        via,
    }))
}

/// `srun` sets the step's variables in each task; a batch script has SLURM_PROCID=0 and no step,
/// and a program started there alone is not rank 0 of the allocation.
fn is_slurm_step(env: &Env<'_>) -> bool {
    env.first(&[
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NODELIST",
    ])
    .is_some()
}

fn via(env: &Env<'_>) -> Result<Via, LaunchError> {
    match env.get("PP_RENDEZVOUS").as_deref().map(str::trim) {
        None | Some("auto") => Ok(Via::Auto),
        Some("unix") => Ok(Via::Unix),
        Some("tcp") => Ok(Via::Tcp),
        Some(other) => Err(bad(
            "PP_RENDEZVOUS",
            other,
            "is not a way to meet",
            "set auto, unix or tcp, the same on every rank",
        )),
    }
}

/// What tells jobs with one secret apart; the same text on every rank.
///
/// torchrun's restart count is left out on purpose: its agents do not agree on it.
fn job_id(env: &Env<'_>, launcher: Launcher) -> String {
    if let Some(id) = env.get("PP_JOB_ID") {
        return id;
    }
    let parts: &[&str] = match launcher {
        Launcher::Torchrun | Launcher::Local => &["TORCHELASTIC_RUN_ID", "MASTER_PORT"],
        Launcher::OpenMpi => &["PMIX_NAMESPACE"],
        Launcher::Slurm => &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    };
    let mut id = launcher.to_string();
    for part in parts {
        id.push('/');
        id.push_str(&env.get(part).unwrap_or_default());
    }
    id
}

fn address(env: &Env<'_>, names: &Names, world: WorldSize) -> Result<Address, LaunchError> {
    let host = match env.get("MASTER_ADDR") {
        Some(host) => host.trim().to_owned(),
        None => launcher_host(env, names, world)?,
    };
    let host = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .to_owned();
    Ok(Address {
        port: port(env, names)?,
        host,
    })
}

fn launcher_host(env: &Env<'_>, names: &Names, world: WorldSize) -> Result<String, LaunchError> {
    let set_it = |remedy: &str| missing(env, names.rank, "MASTER_ADDR", remedy);
    let all_here = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == Some(world.to_string());
    match names.launcher {
        Launcher::OpenMpi if all_here => Ok("127.0.0.1".into()),
        Launcher::OpenMpi => Err(set_it(
            "Open MPI does not say where rank 0 runs: mpirun -x MASTER_ADDR=<host of rank 0>",
        )),
        // The first host of the step runs rank 0 (unless tasks are distributed otherwise). The
        // launching node may be a login node, so it is the last guess.
        Launcher::Slurm => match env.first(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]) {
            Some((name, list)) => first_host(&list).ok_or_else(|| {
                bad(
                    name,
                    &list,
                    "names no first host",
                    "set MASTER_ADDR=<host of rank 0>",
                )
            }),
            None => env
                .get("SLURM_LAUNCH_NODE_IPADDR")
                .map(|host| host.trim().to_owned())
                .ok_or_else(|| set_it("set MASTER_ADDR=<host of rank 0> before srun")),
        },
        Launcher::Torchrun | Launcher::Local => Err(set_it(
            "torchrun sets it; by hand, set it to the host of rank 0 on every rank, or \
             PP_RENDEZVOUS=unix when all ranks share this host",
        )),
    }
}

/// First host of a Slurm list: `gpu[003-007,9],login1` gives `gpu003`.
fn first_host(list: &str) -> Option<String> {
    let list = list.trim();
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (prefix, rest) = list.split_at(end);
    let host = match rest.strip_prefix('[') {
        Some(ranges) => {
            let (inside, after) = ranges.split_once(']')?;
            let first = inside.split([',', '-']).next()?;
            let suffix = after.split([',', '[']).next()?;
            if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            format!("{prefix}{first}{suffix}")
        }
        None => prefix.to_owned(),
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    (!host.is_empty() && host.bytes().all(is_name)).then_some(host)
}

fn port(env: &Env<'_>, names: &Names) -> Result<u16, LaunchError> {
    if let Some(value) = env.get("PP_PORT") {
        return port_number("PP_PORT", &value);
    }
    if let Some(value) = env.get("MASTER_PORT") {
        let port = port_number("MASTER_PORT", &value)?;
        let agent_listens = env
            .get("TORCHELASTIC_USE_AGENT_STORE")
            .is_some_and(|value| value.trim().eq_ignore_ascii_case("true"));
        if names.launcher != Launcher::Torchrun || !agent_listens {
            return Ok(port);
        }
        return port.checked_add(1).ok_or_else(|| {
            bad(
                "MASTER_PORT",
                &value,
                "is torchrun's own, and there is no port after it",
                "set PP_PORT to a free port, the same on every rank",
            )
        });
    }
    let seed = match names.launcher {
        Launcher::Slurm => env.first(&["SLURM_JOB_ID", "SLURM_JOBID"]),
        Launcher::OpenMpi => env.first(&["PMIX_NAMESPACE"]),
        Launcher::Torchrun | Launcher::Local => None,
    };
    let Some((_, seed)) = seed else {
        return Err(missing(
            env,
            names.rank,
            "MASTER_PORT",
            "set it to a free port of rank 0's host, the same on every rank",
        ));
    };
    let spread = pp_contract::digest(seed.as_bytes()) % DERIVED_PORTS;
    // A job id is a number in Slurm: neighbouring jobs get neighbouring ports, never the same.
    let spread = seed
        .trim()
        .parse::<u64>()
        .map_or(spread, |id| id % DERIVED_PORTS);
    // Fits: at most 29,999.
    Ok((FIRST_DERIVED_PORT + spread) as u16)
}

fn port_number(name: &str, value: &str) -> Result<u16, LaunchError> {
    let remedy = "set a port from 1 to 65535, the same on every rank";
    match number::<u16>(name, value, remedy)? {
        0 => Err(bad(
            name,
            value,
            "is not a port that others can find",
            remedy,
        )),
        port => Ok(port),
    }
}

fn number<T: std::str::FromStr>(name: &str, value: &str, remedy: &str) -> Result<T, LaunchError>
where
    T::Err: std::fmt::Display,
{
    value
        .trim()
        .parse()
        .map_err(|error: T::Err| bad(name, value, &format!("is not usable ({error})"), remedy))
}

fn missing(env: &Env<'_>, present: &str, missing: &str, remedy: &str) -> LaunchError {
    let value = shown(&env.get(present).unwrap_or_default());
    let what = format!("{present}={value} is set but {missing} is not");
    LaunchError::new(what, remedy)
}

fn bad(name: &str, value: &str, why: &str, remedy: &str) -> LaunchError {
    LaunchError::new(format!("{name}={:?} {why}", shown(value)), remedy)
}

fn shown(value: &str) -> String {
    value.chars().take(SHOWN_CHARS).collect()
}
