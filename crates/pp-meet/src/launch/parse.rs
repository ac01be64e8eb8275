//! The variables of each launcher, read into a place.

use pp_contract::{Rank, WorldSize};

use super::error::{LaunchError, bad, missing};
use super::launchers::Rules;
use super::place::{Address, Env, Via};
use super::{JobSecret, Launch};

/// Ports from here on, 20,000 of them, are derived from a job's id: above the well-known ones and
/// below those that Linux gives to outgoing connections (32768 and up).
const FIRST_DERIVED_PORT: u64 = 10_000;
const DERIVED_PORTS: u64 = 20_000;
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
fn world(env: &Env<'_>) -> Result<Option<(Rules, &'static str, WorldSize)>, LaunchError> {
    let Some(rules) = Rules::of(env) else {
        return Ok(None);
    };
    let Some((size_name, size)) = env.first(rules.size) else {
        return Err(missing(env, rules.rank, rules.size[0], rules.how));
    };
    let world_size = WorldSize::new(number::<u32>(size_name, &size, rules.how)?)
        .map_err(|error| bad(size_name, "0", &error.to_string(), rules.how))?;
    Ok(Some((rules, size_name, world_size)))
}

/// How many ranks the launcher started, if there is one.
pub(super) fn world_size(env: &Env<'_>) -> Result<Option<WorldSize>, LaunchError> {
    Ok(world(env)?.map(|(_, _, size)| size))
}

/// The place of this process, if there is a launcher.
pub(super) fn place(env: &Env<'_>) -> Result<Option<Launch>, LaunchError> {
    // A wrong value is refused without a launcher, too.
    let via = via(env)?;
    let Some((rules, size_name, world_size)) = world(env)? else {
        return Ok(None);
    };
    let Some(rank_text) = env.get(rules.rank) else {
        return Err(missing(env, size_name, rules.rank, rules.how));
    };
    let rank = number::<u32>(rules.rank, &rank_text, rules.how)?;
    if !world_size.contains(Rank::new(rank)) {
        return Err(LaunchError::new(
            format!("{}={rank} contradicts {size_name}={world_size}", rules.rank),
            format!("ranks of this world go from 0 to {}", world_size.get() - 1),
        ));
    }
    let local_rank = match env.get(rules.local_rank) {
        Some(value) => number(rules.local_rank, &value, rules.how)?,
        None => rank,
    };
    // Open MPI does not number the ranks of a host in the order of their ranks.
    if local_rank >= world_size.get() {
        return Err(LaunchError::new(
            format!(
                "{}={local_rank} contradicts {size_name}={world_size}",
                rules.local_rank
            ),
            "it counts the ranks of one host, from 0; give each process of a host its own",
        ));
    }
    let address = match via {
        Via::Unix => None,
        Via::Auto | Via::Tcp => Some(address(env, &rules, world_size)?),
    };
    Ok(Some(Launch {
        secret: JobSecret::from_env(env, &rules)?,
        launcher: rules.launcher,
        is_all_or_none: (rules.is_all_or_none)(env),
        rank: Rank::new(rank),
        world_size,
        local_rank,
        job_id: job_id(env, &rules),
        address,
        via,
    }))
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
fn job_id(env: &Env<'_>, rules: &Rules) -> String {
    let of_launcher = || {
        let parts = rules
            .job_id
            .iter()
            .map(|part| env.get(part).unwrap_or_default());
        parts.fold(rules.launcher.to_string(), |id, part| {
            format!("{id}/{part}")
        })
    };
    env.get("PP_JOB_ID").unwrap_or_else(of_launcher)
}

fn address(env: &Env<'_>, rules: &Rules, world: WorldSize) -> Result<Address, LaunchError> {
    let host = rules.host(env, world)?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    Ok(Address {
        port: port(env, rules)?,
        host: host.to_owned(),
    })
}

fn port(env: &Env<'_>, rules: &Rules) -> Result<u16, LaunchError> {
    if let Some(value) = env.get("PP_PORT") {
        return port_number("PP_PORT", &value);
    }
    if let Some(value) = env.get("MASTER_PORT") {
        let port = port_number("MASTER_PORT", &value)?;
        let listens = rules.listens.and_then(|name| env.get(name));
        if !listens.is_some_and(|value| value.trim().eq_ignore_ascii_case("true")) {
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
    let Some((_, seed)) = env.first(rules.port_from) else {
        return Err(missing(
            env,
            rules.rank,
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
