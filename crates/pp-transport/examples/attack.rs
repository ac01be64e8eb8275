//! A stranger at the door of a job: makes one attack on the place where its ranks meet, for so
//! long, and says how often it got a connection.
//!
//!     cargo run --release -p pp-transport --example attack -- KIND ADDRESS:PORT|unix:@NAME SECONDS
//!
//! `wrong-secret`, `other-job` and `replay` say what a rank would say: `PP_ATTACK_SECRET` and
//! `PP_ATTACK_JOB` are the secret and the id that it would have. Without a kind it lists them.

#[path = "../tests/attack/mod.rs"]
mod attack;

use std::process::ExitCode;
use std::time::Duration;

use attack::{Attack, Attacker, Target};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("attack: {error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<(), String> {
    let mut args = std::env::args().skip(1);
    let Some(kind) = args.next() else {
        for attack in Attack::ALL {
            println!("{attack}");
        }
        return Ok(());
    };
    let attack: Attack = kind.parse()?;
    let target: Target = args.next().ok_or("no address")?.parse()?;
    let seconds = args.next().ok_or("no number of seconds")?;
    let seconds: f64 = seconds.parse().map_err(|_| "no number of seconds")?;
    let calls = match attack {
        Attack::WrongSecret | Attack::OtherJob | Attack::Replay => {
            let set = |name: &str| std::env::var(name).map_err(|_| format!("{name} is not set"));
            attack::calls(&set("PP_ATTACK_SECRET")?, &set("PP_ATTACK_JOB")?)
        }
        _ => Vec::new(),
    };
    let attacker = Attacker::start(attack, &target, calls);
    std::thread::sleep(Duration::from_secs_f64(seconds.clamp(0.0, 3600.0)));
    println!(
        "{} connections, {} refused",
        attacker.connected(),
        attacker.refused()
    );
    attacker.stop();
    Ok(())
}
