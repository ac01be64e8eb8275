//! A job whose program says how its ranks are started.

use std::ffi::OsString;
use std::path::PathBuf;

use pp_job::prelude::*;
use pp_testing::{Folder, Toy, ToySink, ToySource, done};

/// Names the file that rank 0 writes at the end, as an argument that the harness of the tests takes.
const FILE: &str = "--skip=";

/// Three chunks go through a stage on rank 1, which dies at the second one, once.
fn run(config: &Config, command: &[OsString], file: &PathBuf) -> Result<(), Error> {
    let died = file.with_extension("died");
    let open = |_| {
        let mut offered = 0;
        let poll = move || {
            offered += 1;
            match offered > 3 {
                true => Offer::End,
                false => Offer::Chunk(Cut::None),
            }
        };
        let build = |place: Place, _: &mut TxLease| {
            Built::new(Toy(place.chunk.get()), Manifest::empty(), ())
        };
        Ok(Opened::new(ToySource::new(poll, build)))
    };
    let program = Program::<Host, _, _>::new("a", open)
        .payloads(|_, ()| 64)
        .stage("b", |_, ()| {
            Ok(OnHost::new(
                |chunk: Chunk<'_, Toy>, _: &[u8], _: &mut [u8]| {
                    if chunk.message.plan().0 == 1 && !died.exists() {
                        std::fs::write(&died, "")?;
                        std::process::abort();
                    }
                    Ok(done(chunk.message, Manifest::empty()))
                },
            ))
        })
        .sink("c", |(), _| Ok(ToySink::<Toy, _>::new(|_, _| Ok(()))))
        .finish(|_, finished| {
            std::fs::write(file, finished.restarts.to_string())?;
            Ok(())
        });
    let pipeline = "a@0 -> b@1 -> c@0".parse()?;
    let job = Job::new(config, &pipeline).restarts(1).command(command);
    job.run(|rank| rank.run(Host, Profile::new(), program))
}

#[test]
#[ignore = "the ranks that the other tests start"]
fn program() {
    let config = Config::from_env(|name| std::env::var_os(name)).unwrap();
    assert!(config.is_supervised(), "a rank alone");
    let file = std::env::args().find_map(|arg| Some(arg.strip_prefix(FILE)?.into()));
    pp_job::main(|| run(&config, &[], &file.unwrap()));
}

#[test]
fn ranks_are_started_by_the_command_that_was_given_also_again() {
    let folder = Folder::scratch();
    let file = folder.file("restarts");
    let program = std::env::current_exe().unwrap().into_os_string();
    let args = ["command::program", "--exact", "--ignored", "--nocapture"];
    let skip = format!("{FILE}{}", file.display());
    let args = args.into_iter().map(OsString::from).chain([skip.into()]);
    let command: Vec<OsString> = [program].into_iter().chain(args).collect();
    let config = Config::alone(|_| None).unwrap();
    run(&config, &command, &file).unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "1");
}

#[test]
fn a_command_that_cannot_be_started_is_named() {
    let config = Config::alone(|_| None).unwrap();
    let command = ["/no/such/python".into()];
    let error = run(&config, &command, &PathBuf::new()).unwrap_err();
    let words = "cannot start rank 0 with \"/no/such/python\": No such file";
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(error.code(), 2);
}
