//! Three ranks that launchers start, with the sink apart: on one host, on two, and where memory would have to reach
//! from one to the other.

use std::process::Command;

use pp_fakes::Fakes;
use pp_testing::net::{ADDRESSES, Net};
use pp_testing::process::{Ended, Output, Process, as_rank, free_port, run, wait_until_it_runs};
use pp_testing::{Folder, video};
use rustix::process::Signal;

use crate::common::{endless, folder, pp};

const PIPELINE: &str = "encode@0 -> phase_b@1 -> decode@2";
const SECRET: (&str, &str) = ("PP_JOB_SECRET", "a secret of more than sixteen bytes");
/// In a network namespace of its own any port is free.
const PORT: &str = "29555";

/// The job of a test, from file to file.
struct Film {
    folder: Folder,
    args: Vec<&'static str>,
}

impl Film {
    /// On shared memory, or on the GPUs and the NCCL of the fakes.
    fn new(test: &str, fakes: Option<&Fakes>) -> Self {
        let folder = folder(test);
        folder.write("in.y4m", &video(48, 32, "420jpeg", 11));
        let args = match fakes {
            None => ["--transport", "host", "--kernels", "cpu"],
            Some(_) => ["--transport", "nccl", "--kernels", "ptx"],
        };
        Self {
            folder,
            args: args.into(),
        }
    }

    fn command(&self, output: &str, more: &[&str]) -> Command {
        let mut command = pp(&["run", "--denoise-steps", "2", "--frames-per-chunk", "2"]);
        command.args(&self.args).args(more);
        command.arg("--input").arg(self.folder.file("in.y4m"));
        command.arg("--output").arg(self.folder.file(output));
        command
    }

    fn rank(&self) -> Command {
        let mut rank = self.command("out.y4m", &["--pipeline", PIPELINE]);
        rank.env(SECRET.0, SECRET.1);
        rank
    }

    /// What one process makes.
    fn alone(&self, prepare: impl Fn(&mut Command)) -> Vec<u8> {
        let mut alone = self.command("alone.y4m", &["--ranks", "1"]);
        prepare(&mut alone);
        run(&mut alone, None).succeeded();
        std::fs::read(self.folder.file("alone.y4m")).unwrap()
    }

    #[track_caller]
    fn assert_made(&self, ranks: Vec<Ended>, expected: &[u8]) {
        assert!(ranks.iter().all(|rank| rank.code == Some(0)), "{ranks:#?}");
        let made = self.folder.file("out.y4m");
        assert!(
            std::fs::read(&made).unwrap() == expected,
            "the film is another"
        );
        std::fs::remove_file(made).unwrap();
    }
}

/// Starts all ranks, and waits for the end of each.
fn ended(ranks: impl Iterator<Item = Command>) -> Vec<Ended> {
    let start = |mut rank: Command| Process::start(&mut rank, Output::Kept).unwrap();
    let started: Vec<Process> = ranks.map(start).collect();
    started.iter().map(Ended::of).collect()
}

/// What this launcher sets on one host.
fn launched(by: &str, rank: usize, port: &str) -> Vec<(&'static str, String)> {
    match by {
        "torchrun" => torchrun(rank, "127.0.0.1", port),
        "Slurm" => slurm(rank, port),
        _ => open_mpi(rank, port),
    }
}

const LAUNCHERS: [&str; 3] = ["torchrun", "Slurm", "Open MPI"];

#[test]
fn a_launcher_that_cannot_start_one_rank_again_takes_no_restarts() {
    let film = Film::new("together", None);
    for name in LAUNCHERS {
        let mut rank = film.command("out.y4m", &["--pipeline", PIPELINE, "--restarts", "1"]);
        rank.env(SECRET.0, SECRET.1).envs(launched(name, 0, PORT));
        let words = [
            &format!("{name} ends or restarts all ranks"),
            "leave --restarts out",
        ];
        run(&mut rank, None).failed(2, &words);
    }
}

/// What torchrun sets on one host.
fn torchrun(rank: usize, address: &str, port: &str) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", "3".into()),
        ("LOCAL_WORLD_SIZE", "3".into()),
        ("MASTER_ADDR", address.into()),
        ("MASTER_PORT", port.into()),
        ("TORCHELASTIC_RUN_ID", "none".into()),
    ]
}

/// What `srun` sets on one host.
fn slurm(rank: usize, port: &str) -> Vec<(&'static str, String)> {
    vec![
        ("SLURM_PROCID", rank.to_string()),
        ("SLURM_LOCALID", rank.to_string()),
        ("SLURM_NTASKS", "3".into()),
        ("SLURM_JOB_ID", "7".into()),
        ("SLURM_STEP_ID", "0".into()),
        ("SLURM_STEP_NODELIST", "localhost".into()),
        ("PP_PORT", port.into()),
    ]
}

/// What Open MPI's `mpirun` sets on one host. It does not number ranks on a host in their order.
fn open_mpi(rank: usize, port: &str) -> Vec<(&'static str, String)> {
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", [0, 2, 1][rank].to_string()),
        ("OMPI_COMM_WORLD_SIZE", "3".into()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "3".into()),
        ("PMIX_NAMESPACE", "prterun-host-7@1".into()),
        ("PP_PORT", port.into()),
    ]
}

#[test]
fn launchers_start_three_ranks_with_the_sink_apart() {
    let film = Film::new("launched", None);
    let expected = film.alone(|_| ());
    for name in LAUNCHERS {
        let port = free_port().to_string();
        let ranks = (0..3).map(|rank| {
            let mut command = film.rank();
            command.envs(launched(name, rank, &port));
            command
        });
        film.assert_made(ended(ranks), &expected);
    }
}

/// Two hosts; `None` where none can be made, which is said.
fn two_hosts() -> Option<Net> {
    match Net::new() {
        Ok(net) => Some(net),
        Err(why) => {
            assert!(std::env::var_os("PP_TESTS_MUST_RUN").is_none(), "{why}");
            eprintln!("skipped: {why}");
            None
        }
    }
}

/// The ranks of a job, each on the host that stands in its place here. Rank 0 is called by the address of its host. The
/// fakes show all GPUs on both hosts, so ranks count as if they were on one.
fn on_hosts(net: &Net, hosts: [usize; 3], job: impl Fn() -> Command) -> Vec<Ended> {
    ended(hosts.into_iter().enumerate().map(|(rank, host)| {
        let job = job();
        let mut command = net.command(host, job.get_program());
        command.args(job.get_args());
        for (name, value) in job.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.envs(torchrun(rank, ADDRESSES[hosts[0]], PORT));
        command
    }))
}

#[test]
fn ranks_of_one_host_share_memory_whatever_the_address() {
    let Some(net) = two_hosts() else {
        return;
    };
    let film = Film::new("one_host", None);
    let expected = film.alone(|_| ());
    for host in [0, 1] {
        let ranks = on_hosts(&net, [host; 3], || film.rank());
        film.assert_made(ranks, &expected);
    }
}

#[test]
fn memory_of_two_hosts_is_refused_in_one_line() {
    let Some(net) = two_hosts() else {
        return;
    };
    let film = Film::new("two_hosts", None);
    for hosts in [[0, 0, 1], [0, 1, 1], [1, 0, 1]] {
        for rank in on_hosts(&net, hosts, || film.rank()) {
            rank.failed(6, &["map edges", "one machine", "--transport nccl"]);
        }
        assert_eq!(film.folder.names(), ["in.y4m"]);
    }
}

/// The sink has a host of its own: messages of phase_b and acceptances cross the cable, payloads NCCL.
#[test]
fn gpus_of_two_hosts_make_the_film_of_one() {
    let Some(net) = two_hosts() else {
        return;
    };
    let fakes = Fakes::newest();
    let film = Film::new("gpus_of_two_hosts", Some(&fakes));
    let give = |command: &mut Command| {
        let meet = film.folder.file("meet");
        std::fs::create_dir_all(&meet).unwrap();
        fakes.give_to(command);
        command.env("PP_FAKE_NCCL_DIR", meet);
        command.env("PP_FAKE_DEVICES", "3");
    };
    let expected = film.alone(give);
    for hosts in [[0, 0, 1], [0, 1, 1], [1, 0, 1], [0, 1, 0]] {
        let ranks = on_hosts(&net, hosts, || {
            let mut rank = film.rank();
            give(&mut rank);
            rank
        });
        film.assert_made(ranks, &expected);
    }
}

/// The end of the process ends the communicators, too, and NCCL would take its time.
#[test]
fn a_rank_that_failed_does_not_wait_until_nccl_has_ended_its_communicators() {
    let folder = folder("nccl_left");
    let (port, gate) = (free_port(), folder.write("gate", b""));
    std::fs::create_dir_all(folder.file("meet")).unwrap();
    let ranks = [0, 1].map(|rank| {
        let mut command = as_rank(endless("300000", "0.5"), rank, port);
        Fakes::newest().give_to(&mut command);
        command
            .args(["--transport", "nccl"])
            .env("PP_FAKE_GATE", &gate);
        command.env("PP_LOG", "warn,pp_job=debug");
        command.env("PP_FAKE_NCCL_DIR", folder.file("meet"));
        command.env("PP_FAKE_FAULTS", "ncclCommAbort:1:wait");
        Process::start(&mut command, Output::Kept).unwrap()
    });
    wait_until_it_runs(ranks[0].id());
    ranks[1].signal(Signal::KILL);
    let ended = Ended::of(&ranks[0]).ended(7, &["rank 1 is gone"]);
    for waited in ["did not end", "not return within 5."] {
        assert!(!ended.stderr.contains(waited), "{}", ended.stderr);
    }
}
