//! Ranks from the environment, as each launcher sets it.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;

use pp_contract::{Rank, WorldSize};
use pp_testing::{assert_has, rows, words};
use pp_transport::launch::{JobSecret, Launch, LaunchError, Launcher, LocalJob, Via};

const SECRET: &str = "0123456789abcdef0123456789abcdef";

fn read(variables: &[(&str, &str)]) -> Result<Option<Launch>, LaunchError> {
    Launch::from_env(|name| {
        let is_removed = LocalJob::launcher_variables().any(|known| known == name);
        assert!(is_removed, "{name} would shine through to a child");
        let found = variables.iter().rev().find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

/// As `read`, with a secret.
fn place(variables: &[(&str, &str)]) -> Result<Option<Launch>, LaunchError> {
    read(&[&[("PP_JOB_SECRET", SECRET)], variables].concat())
}

/// Launcher, rank, world size, local rank, address.
fn summary(variables: &[(&str, &str)]) -> (Launcher, u32, u32, u32, String) {
    let launch = place(variables).unwrap().unwrap();
    (
        launch.launcher(),
        launch.rank().get(),
        launch.world_size().get(),
        launch.local_rank(),
        launch
            .address()
            .map(ToString::to_string)
            .unwrap_or_default(),
    )
}

fn refusal(variables: &[(&str, &str)]) -> String {
    place(variables).unwrap_err().to_string()
}

const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "run7"),
];
const SLURM: &[(&str, &str)] = &[
    ("SLURM_PROCID", "2"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_JOB_ID", "123456"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NODELIST", "gpu[003-004]"),
    ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9"),
];
const OPEN_MPI: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "prterun-node-77@1"),
];

fn with<'a>(base: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [base, more].concat()
}

fn without<'a>(base: &[(&'a str, &'a str)], name: &str) -> Vec<(&'a str, &'a str)> {
    base.iter()
        .filter(|(key, _)| *key != name)
        .copied()
        .collect()
}

#[test]
fn no_launcher_is_no_error() {
    assert!(read(&[]).unwrap().is_none());
    assert!(
        read(&[("MASTER_ADDR", "node0"), ("RANK", " ")])
            .unwrap()
            .is_none()
    );
    // A batch script is no task of srun, though Slurm numbers it 0.
    let batch = [
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_JOB_ID", "1"),
    ];
    assert!(read(&batch).unwrap().is_none());
}

#[test]
fn torchrun_is_read() {
    let expected = (Launcher::Torchrun, 3, 4, 1, "node0:29500".to_owned());
    assert_eq!(summary(TORCHRUN), expected);
    let agent = with(TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "True")]);
    assert_eq!(
        summary(&agent).4,
        "node0:29501",
        "the agent has its own port"
    );
    let not_agent = with(TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "False")]);
    assert_eq!(summary(&not_agent).4, "node0:29500");
    let port = with(&agent, &[("PP_PORT", "4000")]);
    assert_eq!(summary(&port).4, "node0:4000");
    let v6 = with(TORCHRUN, &[("MASTER_ADDR", "fd00::1")]);
    assert_eq!(summary(&v6).4, "[fd00::1]:29500");
}

#[test]
fn local_rank_defaults_to_the_rank() {
    assert_eq!(summary(&without(TORCHRUN, "LOCAL_RANK")).3, 3);
}

#[test]
fn slurm_is_read() {
    let expected = (Launcher::Slurm, 2, 4, 0, "gpu003:13456".to_owned());
    assert_eq!(summary(SLURM), expected);
    let master = with(SLURM, &[("MASTER_ADDR", "node7"), ("MASTER_PORT", "5000")]);
    assert_eq!(summary(&master).4, "node7:5000");
    let step = with(SLURM, &[("SLURM_STEP_NUM_TASKS", "3")]);
    assert_eq!(summary(&step).2, 3, "the step's own count comes first");
    let launching = without(SLURM, "SLURM_STEP_NODELIST");
    assert_eq!(summary(&launching).4, "10.0.0.9:13456");
}

#[test]
fn first_host_of_a_slurm_list_is_found() {
    for (list, host) in [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-007,9],login1", "gpu003"),
        ("gpu[12]", "gpu12"),
        ("rack[1-2]-gpu,x", "rack1-gpu"),
        ("a-b.example_1,c", "a-b.example_1"),
    ] {
        let variables = with(SLURM, &[("SLURM_STEP_NODELIST", list)]);
        assert_eq!(summary(&variables).4, format!("{host}:13456"), "{list}");
    }
    for list in [",", "gpu[", "gpu[x-y]", "gpu[-3]", "a b", "$(reboot)"] {
        let refusal = refusal(&with(SLURM, &[("SLURM_STEP_NODELIST", list)]));
        assert!(refusal.contains("SLURM_STEP_NODELIST") && refusal.contains("MASTER_ADDR"));
    }
}

#[test]
fn open_mpi_is_read() {
    let (launcher, rank, world, local, address) = summary(OPEN_MPI);
    assert_eq!((launcher, rank, world, local), (Launcher::OpenMpi, 1, 2, 1));
    let port: u16 = address.strip_prefix("127.0.0.1:").unwrap().parse().unwrap();
    assert!((10_000..30_000).contains(&port));
    // mpirun 5 numbers three ranks of a host 0, 2, 1.
    let three = [
        ("OMPI_COMM_WORLD_SIZE", "3"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
    ];
    let (_, rank, world, local, _) = summary(&with(OPEN_MPI, &three));
    assert_eq!((rank, world, local), (1, 3, 2));
    let master = with(OPEN_MPI, &[("MASTER_ADDR", "node0"), ("PP_PORT", "81")]);
    assert_eq!(summary(&master).4, "node0:81");
}

#[test]
fn open_mpi_over_several_hosts_needs_an_address() {
    let refusal = refusal(&with(OPEN_MPI, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]));
    assert_eq!(
        refusal,
        "OMPI_COMM_WORLD_RANK=1 is set but MASTER_ADDR is not; Open MPI does not say where rank 0 \
         runs: mpirun -x MASTER_ADDR=<host of rank 0>"
    );
}

#[test]
fn innermost_launcher_counts() {
    let torchrun_in_slurm = [SLURM, TORCHRUN].concat();
    assert_eq!(summary(&torchrun_in_slurm).0, Launcher::Torchrun);
    let mpirun_in_slurm = [SLURM, OPEN_MPI].concat();
    assert_eq!(summary(&mpirun_in_slurm).0, Launcher::OpenMpi);
}

#[test]
fn half_set_and_impossible_variables_are_named() {
    let cases = rows("
        - | RANK=1 | RANK=1 is set but WORLD_SIZE is not; torchrun
        - | WORLD_SIZE=2 | WORLD_SIZE=2 is set but RANK is not
        TORCHRUN | MASTER_ADDR | MASTER_ADDR is not; PP_RENDEZVOUS=unix
        TORCHRUN | MASTER_PORT | MASTER_PORT is not; free port
        TORCHRUN | RANK=4 | RANK=4 contradicts WORLD_SIZE=4; 0 to 3
        TORCHRUN | RANK=-1 | RANK=\"-1\" is not usable
        TORCHRUN | WORLD_SIZE=0 | WORLD_SIZE=\"0\"; at least one rank
        TORCHRUN | WORLD_SIZE=two | WORLD_SIZE=\"two\" is not usable
        TORCHRUN | LOCAL_RANK=4 | LOCAL_RANK=4 contradicts WORLD_SIZE=4
        TORCHRUN | MASTER_PORT=0 | MASTER_PORT=\"0\"; 1 to 65535
        TORCHRUN | MASTER_PORT=65536 | MASTER_PORT=\"65536\"
        TORCHRUN | PP_PORT=http | PP_PORT=\"http\"
        TORCHRUN | PP_RENDEZVOUS=udp | PP_RENDEZVOUS=\"udp\"; unix
        - | PP_RENDEZVOUS=udp | PP_RENDEZVOUS=\"udp\"; unix
        TORCHRUN | MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True | MASTER_PORT=\"65535\"; PP_PORT
        SLURM | SLURM_NTASKS | SLURM_PROCID=2; SLURM_STEP_NUM_TASKS is not
        OPEN_MPI | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_RANK is not; mpirun
    ");
    for [base, changes, parts] in cases {
        let mut variables = match base {
            "TORCHRUN" => TORCHRUN.to_vec(),
            "SLURM" => SLURM.to_vec(),
            "OPEN_MPI" => OPEN_MPI.to_vec(),
            _ => Vec::new(),
        };
        for change in words(changes) {
            let (name, value) = change.split_once('=').unwrap_or((change, ""));
            variables.retain(|(other, _)| *other != name);
            variables.extend((!value.is_empty()).then_some((name, value)));
        }
        let refusal = refusal(&variables);
        assert_has(&refusal, &parts.split("; ").collect::<Vec<_>>());
        assert!(!refusal.contains('\n'));
    }
}

#[test]
fn ranks_of_one_host_need_no_address() {
    let variables = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("PP_RENDEZVOUS", "unix"),
    ];
    let launch = place(&variables).unwrap().unwrap();
    assert_eq!((launch.via(), launch.address()), (Via::Unix, None));
}

#[test]
fn job_id_is_the_same_on_every_rank_and_no_other_jobs() {
    let id = |variables: &[(&str, &str)]| place(variables).unwrap().unwrap().job_id().to_owned();
    assert_eq!(
        id(TORCHRUN),
        id(&with(TORCHRUN, &[("RANK", "0"), ("LOCAL_RANK", "0")]))
    );
    assert_ne!(
        id(TORCHRUN),
        id(&with(TORCHRUN, &[("TORCHELASTIC_RUN_ID", "run8")]))
    );
    assert_ne!(id(SLURM), id(&with(SLURM, &[("SLURM_STEP_ID", "1")])));
    assert_eq!(id(&with(SLURM, &[("PP_JOB_ID", "mine")])), "mine");
}

#[test]
fn launcher_without_a_secret_is_refused_with_the_remedy() {
    for (base, says) in [
        (TORCHRUN, "started by torchrun"),
        (SLURM, "started by Slurm"),
        (OPEN_MPI, "mpirun -x PP_JOB_SECRET"),
    ] {
        let refusal = read(base).unwrap_err().to_string();
        assert!(refusal.contains(says), "{refusal}");
        assert!(refusal.contains("export PP_JOB_SECRET=$(openssl rand -hex 32)"));
    }
}

#[test]
fn short_secret_is_refused_and_never_shown() {
    let refusal = refusal(&with(TORCHRUN, &[("PP_JOB_SECRET", "hunter2")]));
    assert_eq!(
        refusal,
        "PP_JOB_SECRET holds 7 bytes, not 16 to 4096; make one with: openssl rand -hex 32"
    );
    let launch = place(TORCHRUN).unwrap().unwrap();
    assert!(!format!("{launch:?}").contains(&SECRET[..6]));
    assert_eq!(format!("{:?}", JobSecret::random()), "JobSecret(..)");
}

/// A file with a secret and a mode, deleted with the test.
struct SecretFile(std::path::PathBuf);

impl SecretFile {
    fn new(name: &str, text: &str, mode: u32) -> Self {
        let path = std::env::temp_dir().join(format!("pp-{}-{name}", std::process::id()));
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.set_permissions(std::fs::Permissions::from_mode(mode))
            .unwrap();
        Self(path)
    }

    fn read(&self) -> Result<Option<Launch>, LaunchError> {
        read(&with(
            TORCHRUN,
            &[("PP_JOB_SECRET_FILE", self.0.to_str().unwrap())],
        ))
    }
}

impl Drop for SecretFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn secret_file_is_read_when_it_is_private() {
    let file = SecretFile::new("good", &format!("{SECRET}\n"), 0o600);
    assert!(file.read().unwrap().is_some());
    let open = SecretFile::new("open", SECRET, 0o644)
        .read()
        .unwrap_err()
        .to_string();
    assert_has(&open, &["mode 644", "chmod 600"]);
    let short = SecretFile::new("short", "short\n", 0o600)
        .read()
        .unwrap_err()
        .to_string();
    assert!(short.contains("holds 5 bytes"), "{short}");
    let long = SecretFile::new("long", &"x".repeat(9000), 0o600)
        .read()
        .unwrap_err()
        .to_string();
    assert!(long.contains("4097 bytes"), "{long}");
}

#[test]
fn secret_file_that_cannot_be_read_is_named() {
    for path in ["/nonexistent/secret", "/dev/null"] {
        let error = read(&with(TORCHRUN, &[("PP_JOB_SECRET_FILE", path)])).unwrap_err();
        assert!(error.to_string().contains(path), "{error}");
    }
    let both = with(TORCHRUN, &[("PP_JOB_SECRET_FILE", "/dev/null")]);
    assert!(refusal(&both).contains("PP_JOB_SECRET contradicts PP_JOB_SECRET_FILE"));
}

#[test]
fn local_job_gives_each_child_its_place() {
    let job = LocalJob::new(WorldSize::new(2).unwrap());
    let env = job.env(Rank::new(1));
    let variables: Vec<(&str, &str)> = env.iter().map(|(k, v)| (*k, v.as_str())).collect();
    let launch = read(&variables).unwrap().unwrap();
    let here = job.launch(Rank::new(1)).unwrap();
    assert_eq!(launch.rank(), here.rank());
    assert_eq!(launch.world_size(), here.world_size());
    assert_eq!(launch.job_id(), here.job_id());
    assert_eq!(launch.via(), Via::Unix);
    assert!(job.launch(Rank::new(2)).is_err());
}

#[test]
fn local_job_keeps_its_secret_out_of_its_childrens_environment() {
    let job = LocalJob::new(WorldSize::new(2).unwrap());
    let env = job.env(Rank::new(1));
    assert!(env.iter().all(|(name, _)| *name != "PP_JOB_SECRET"));
    let file = env.iter().find(|(name, _)| *name == "PP_JOB_SECRET_FILE");
    let (_, path) = file.expect("a file in its place");
    let secret = std::fs::read_to_string(path).unwrap();
    assert_eq!(secret.len(), 64);
    assert!(env.iter().all(|(_, value)| !value.contains(&secret)));
    assert!(!format!("{job:?}").contains(&secret));
    // No process can write into it, and it is gone with the job.
    assert!(std::fs::write(path, "another secret of many bytes").is_err());
    drop(job);
    // Its number may be that of another file by now.
    assert!(!std::fs::read_to_string(path).is_ok_and(|text| text == secret));
}
