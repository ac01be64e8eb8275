//! How long schedules of every kind take to build, to lower, to check and to simulate, in milliseconds.
//!
//!     cargo run --release -p pp-runtime --example schedule_speed [RANKS MICROBATCHES [KIND]]

use std::time::Instant;

use pp_runtime::schedule::{Costs, Kind, Limits, Schedule};

fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let made = work();
    (made, start.elapsed().as_secs_f64() * 1e3)
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u32| {
        arguments.get(at).map_or(default, |text| {
            text.parse().expect("RANKS and MICROBATCHES are numbers")
        })
    };
    let (ranks, microbatches) = (number(0, 64), number(1, 512));
    let wanted = arguments.get(2);
    println!("{ranks} ranks, {microbatches} microbatches");
    println!(
        "kind                steps   build   check  simulate  | lowered  lower   check  simulate"
    );
    for kind in Kind::ALL {
        if wanted.is_some_and(|wanted| wanted != kind.name()) {
            continue;
        }
        let stages = kind.stages_per_rank().unwrap_or(2);
        let (built, build) = timed(|| Schedule::build(kind, ranks, stages, microbatches));
        let built = match built {
            Ok(built) => built,
            Err(error) => {
                println!("{:16} {error}", kind.name());
                continue;
            }
        };
        let (lowered, lower) = timed(|| built.lower(false));
        let lowered = lowered.expect("a schedule that was built can be lowered");
        print!("{:16}", kind.name());
        for (schedule, made) in [(&built, build), (&lowered, lower)] {
            let steps: usize = schedule.ranks().iter().map(Vec::len).sum();
            let (report, check) = timed(|| schedule.check(Limits::default()));
            report.expect("a schedule that was built passes");
            let (timeline, simulate) =
                timed(|| schedule.simulate(&Costs::default(), Limits::default()));
            timeline.expect("a schedule that was built runs");
            print!(" {steps:8} {made:7.0} {check:7.0} {simulate:9.0}");
        }
        println!();
    }
}
