//! `pp top`: the jobs of this user on this machine, in a terminal.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::time::Duration;

use pp_job::seen::{Client, FoundJob, JobState, Snapshot, jobs};
use pp_job::{Config, Error};

/// Between two lists.
const EVERY: Duration = Duration::from_secs(1);
/// Letters of a line where no terminal says how many.
const WIDTH: usize = 200;

/// What is asked for, and where it is shown.
pub struct Top<'a> {
    /// The settings of a job on this machine: they say where the sockets are.
    pub config: &'a Config,
    /// The process of the job that is wanted; of all where there is none.
    pub pid: Option<u32>,
    /// Print a snapshot of each job as a line of JSON, once.
    pub json: bool,
    /// The columns and rows of the terminal; `None` where there is none, and everything is printed once.
    pub size: &'a dyn Fn() -> Option<(u16, u16)>,
    /// Prints a text.
    pub print: &'a dyn Fn(&str) -> Result<(), Error>,
}

impl Top<'_> {
    /// Lists the jobs, or shows the only one, or the one that is wanted; on a terminal until it ends.
    ///
    /// # Errors
    /// There is no such job, or the text cannot be printed.
    pub fn run(&self) -> Result<(), Error> {
        let found = self.found()?;
        if self.json {
            let seen = found.iter().filter_map(|job| look(job).ok());
            return seen.into_iter().try_for_each(|seen| {
                let line =
                    serde_json::to_string(&seen).map_err(|error| Error::Other(error.into()))?;
                (self.print)(&format!("{line}\n"))
            });
        }
        match &found[..] {
            [job] => self.follow(job),
            _ => self.list(found),
        }
    }

    fn found(&self) -> Result<Vec<FoundJob>, Error> {
        let mut found = jobs(self.config);
        if let Some(pid) = self.pid {
            found.retain(|job| job.pid == pid);
            if found.is_empty() {
                return Err(Error::Usage(format!(
                    "no job of this user has the process {pid} as its rank 0 on this machine; pp top lists those that there are"
                )));
            }
        }
        Ok(found)
    }

    /// Shows a job until it ends, or once.
    fn follow(&self, job: &FoundJob) -> Result<(), Error> {
        let mut screen = Screen::default();
        let mut client = Client::connect(job);
        loop {
            let next = client.as_mut().map_or(Ok(None), Client::next_snapshot);
            let seen = match next {
                Ok(Some(seen)) => seen,
                Ok(None) => {
                    return (self.print)(&format!("the job of process {} is over\n", job.pid));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    (self.print)(&format!(
                        "the job of process {} does not answer: it is stopped\n",
                        job.pid
                    ))?;
                    return Ok(());
                }
                Err(error) => return Err(Error::Other(error.into())),
            };
            let size = (self.size)();
            (self.print)(&screen.draw(&one(&seen), size))?;
            if size.is_none() || seen.state == JobState::Ended {
                return Ok(());
            }
        }
    }

    /// Lists all jobs, on a terminal until there is none.
    fn list(&self, mut found: Vec<FoundJob>) -> Result<(), Error> {
        let mut screen = Screen::default();
        loop {
            if found.is_empty() {
                return (self.print)(
                    &screen.draw("no job of this user runs on this machine\n", (self.size)()),
                );
            }
            let rows: Vec<_> = found.iter().map(|job| (job.pid, look(job).ok())).collect();
            let size = (self.size)();
            (self.print)(&screen.draw(&many(&rows), size))?;
            if size.is_none() {
                return Ok(());
            }
            std::thread::sleep(EVERY);
            found = self.found()?;
        }
    }
}

/// The first snapshot of a job, which comes at once.
fn look(job: &FoundJob) -> std::io::Result<Snapshot> {
    let first = Client::connect(job)?.next_snapshot()?;
    first.ok_or_else(|| ErrorKind::NotConnected.into())
}

/// Draws over what it drew before, so that the last picture stays when the program is interrupted.
#[derive(Default)]
struct Screen {
    rows: usize,
}

impl Screen {
    fn draw(&mut self, text: &str, size: Option<(u16, u16)>) -> String {
        let (columns, most) = size.map_or((WIDTH, usize::MAX), |(columns, rows)| {
            (usize::from(columns), usize::from(rows).saturating_sub(1))
        });
        let mut drawn = match self.rows {
            0 => String::new(),
            rows => format!("\x1b[{rows}A\r\x1b[J"),
        };
        self.rows = 0;
        for line in text.lines().take(most) {
            // What a job says is not for a terminal to obey.
            let plain = line.chars().map(|c| if c.is_control() { '?' } else { c });
            drawn.extend(plain.take(columns));
            drawn.push('\n');
            self.rows += 1;
        }
        drawn
    }
}

fn many(jobs: &[(u32, Option<Snapshot>)]) -> String {
    let mut text = format!(
        "{:>9}  {:<12} {:<10} {:>9} {:>9} {:>10} {:>9}  {}\n",
        "PROCESS", "PROGRAM", "STATE", "CHUNKS", "FRAMES/S", "PERIOD", "RESTARTS", "PIPELINE"
    );
    for (pid, seen) in jobs {
        let _ = match seen {
            None => writeln!(text, "{pid:>9}  does not answer"),
            Some(seen) => writeln!(
                text,
                "{pid:>9}  {:<12} {:<10} {:>9} {:>9} {:>10} {:>9}  {}",
                seen.job.program,
                seen.state.word(),
                seen.totals.chunks,
                known(seen.recent.frames_per_second, |rate| format!("{rate:.1}")),
                ms(seen.recent.period_ms),
                seen.totals.restarts,
                seen.job.pipeline
            ),
        };
    }
    text.push_str("pp top PROCESS shows one of them\n");
    text
}

fn one(seen: &Snapshot) -> String {
    let (job, totals, recent) = (&seen.job, &seen.totals, &seen.recent);
    let rate = known(recent.frames_per_second, |rate| format!("{rate:.1}"));
    let slowest = recent
        .slowest_stage
        .as_deref()
        .map_or_else(String::new, |stage| {
            format!(", slowest stage {stage} {}", ms(recent.slowest_stage_ms))
        });
    let count = |value: Option<u32>| known(value, |value| value.to_string());
    let mut text = format!(
        "{} {}, process {} on {}, for {:.0} s\n{}\n\n",
        job.program,
        seen.state.word(),
        job.pid,
        job.host,
        seen.elapsed_s,
        job.pipeline
    );
    for (name, value) in [
        (
            "frames/s",
            format!(
                "{rate}, {} frames in {} chunks",
                totals.frames, totals.chunks
            ),
        ),
        ("period", format!("{}{slowest}", ms(recent.period_ms))),
        (
            "latency",
            format!(
                "{}, 99 % {}, longest {}; added {}, 99 % {}",
                ms(recent.latency_ms),
                ms(recent.latency_p99_ms),
                ms(recent.latency_max_ms),
                ms(recent.added_latency_ms),
                ms(recent.added_latency_p99_ms)
            ),
        ),
        (
            "waiting",
            format!(
                "{} before the source, {} behind the sink; {} of {} in flight",
                count(recent.source_queue),
                count(recent.sink_queue),
                count(recent.in_flight),
                job.depth
            ),
        ),
        (
            "late",
            format!(
                "{} late, {} frames dropped, {} chunks overtaken by cuts, {} steps saved, held back {}",
                totals.late,
                totals.skipped_frames,
                totals.dropped,
                totals.steps_saved,
                ms(Some(totals.held_back_ms))
            ),
        ),
        (
            "restarts",
            format!("{} of {}", totals.restarts, job.restarts_allowed),
        ),
    ] {
        let _ = writeln!(text, "{name:<9} {value}");
    }
    if let Some(training) = &seen.training {
        let loss = known(training.loss, |loss| format!("{loss:.6}"));
        let (steps, schedule) = (training.steps, &training.schedule);
        let bubble = percent(training.bubble);
        let _ = writeln!(
            text,
            "training  loss {loss}, bubble {bubble}, {steps} steps of {schedule}"
        );
    }
    tables(&mut text, seen);
    losses_and_end(&mut text, seen);
    text
}

fn losses_and_end(text: &mut String, seen: &Snapshot) {
    for restart in &seen.restarts {
        let served = match restart.served_ns {
            None => "not served again yet".into(),
            Some(at) => {
                let after = at.saturating_sub(restart.lost_ns) as f64 / 1e6;
                format!("served again after {}", ms(Some(after)))
            }
        };
        let _ = writeln!(text, "lost      {} ({served})", restart.sentence);
    }
    match (&seen.ended, &seen.fault) {
        (Some(ended), _) if ended.code == 0 => text.push_str("ended     well\n"),
        (Some(ended), _) => {
            _ = writeln!(
                text,
                "ended     with exit code {}: {}",
                ended.code, ended.sentence
            )
        }
        (None, Some(fault)) => _ = writeln!(text, "fault     {}", fault.sentence),
        (None, None) => {}
    }
}

fn tables(text: &mut String, seen: &Snapshot) {
    let _ = writeln!(
        text,
        "\n{:>4}  {:<26} {:>7} {:>11}  DEVICE",
        "RANK", "IDLE", "WAITING", "MEMORY"
    );
    for rank in &seen.ranks {
        let share = rank.idle_share.unwrap_or(0.0).clamp(0.0, 1.0);
        let filled = (share * 20.0).round() as usize;
        let bar = format!("{}{}", "#".repeat(filled), ".".repeat(20 - filled));
        let memory = rank.device_total_bytes.map_or_else(String::new, |total| {
            format!(
                " {} of {} free",
                bytes(rank.device_free_bytes),
                bytes(Some(total))
            )
        });
        let _ = writeln!(
            text,
            "{:>4}  {:>5} {bar} {:>7} {:>11}  {}{memory}",
            rank.rank,
            percent(rank.idle_share),
            known(rank.queued, |queued| queued.to_string()),
            bytes(rank.resident_bytes),
            rank.device.as_deref().unwrap_or_default()
        );
    }
    let _ = writeln!(
        text,
        "\n{:<20} {:<12} {:>10} {:>10} {:>6}",
        "STAGE", "RANKS", "WORK", "WAIT", "IDLE"
    );
    for stage in &seen.stages {
        let ranks: Vec<String> = stage.ranks.iter().map(u32::to_string).collect();
        let _ = writeln!(
            text,
            "{:<20} {:<12} {:>10} {:>10} {:>6}",
            stage.stage,
            ranks.join("+"),
            ms(stage.work_ms),
            ms(stage.idle_ms),
            percent(stage.idle_share)
        );
    }
}

fn known<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".into(), show)
}

fn percent(share: Option<f64>) -> String {
    known(share, |share| format!("{:.0} %", 100.0 * share))
}

fn ms(ms: Option<f64>) -> String {
    known(ms, |ms| match ms {
        0.0 => "0 ms".into(),
        ms if ms < 1.0 => format!("{:.0} µs", 1e3 * ms),
        ms if ms < 10.0 => format!("{ms:.2} ms"),
        ms if ms < 10_000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1e3),
    })
}

fn bytes(bytes: Option<u64>) -> String {
    known(bytes, |bytes| match bytes {
        0..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    })
}

#[cfg(test)]
mod tests {
    use pp_job::seen::TrainingView;

    use super::*;

    #[test]
    fn a_training_has_its_loss_and_bubble_and_another_job_no_such_line() {
        let training = TrainingView {
            schedule: "zbv".into(),
            steps: 3,
            loss: Some(0.25),
            bubble: Some(0.125),
        };
        let mut seen = Snapshot::default();
        assert!(!one(&seen).contains("training"));
        seen.training = Some(training);
        let line = "\ntraining  loss 0.250000, bubble 12 %, 3 steps of zbv\n";
        assert!(one(&seen).contains(line), "{}", one(&seen));
    }

    #[test]
    fn a_picture_fits_its_terminal_and_covers_the_one_before() {
        let mut screen = Screen::default();
        let text = "one\x1b[2J\nlonger than it is wide\nthree\nfour\n";
        assert_eq!(
            screen.draw(text, Some((8, 4))),
            "one?[2J\nlonger t\nthree\n"
        );
        assert_eq!(screen.draw("x\n", Some((8, 4))), "\x1b[3A\r\x1b[Jx\n");
        assert_eq!(
            Screen::default().draw(text, None),
            text.replace('\x1b', "?")
        );
    }
}
