//! The figures of a job as Prometheus reads them: base units, and no label with the number of a chunk.

use std::fmt::Write as _;

use pp_job::seen::{JobState, RankView, Snapshot, StageView};

/// The media type of the text.
pub(crate) const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";
const STATES: [JobState; 5] = [
    JobState::Starting,
    JobState::Running,
    JobState::Restarting,
    JobState::Draining,
    JobState::Ended,
];

/// Labels and a value; none is left out.
type Sample = (String, Option<f64>);

/// The text of a snapshot.
pub(crate) fn text(seen: &Snapshot) -> String {
    let mut text = String::new();
    let job = &seen.job;
    let about = [
        ("program", &job.program),
        ("pipeline", &job.pipeline),
        ("version", &job.pp_version),
    ];
    let about = about.map(|(name, value)| label(name, value)).join(",");
    let state = |of: JobState| {
        let is_it = f64::from(u8::from(of == seen.state));
        (label("state", of.word()), Some(is_it))
    };
    gauge(&mut text, "job_info", "What is run.", [(about, Some(1.0))]);
    gauge(
        &mut text,
        "job_state",
        "1 for the state that the job is in.",
        STATES.map(state),
    );
    gauge(
        &mut text,
        "job_start_time_seconds",
        "When the job started, since 1970.",
        one(Some(job.started_unix_s as f64)),
    );
    gauge(
        &mut text,
        "depth_chunks",
        "The most chunks in flight.",
        one(Some(f64::from(job.depth))),
    );
    totals(&mut text, seen);
    recent(&mut text, seen);
    training(&mut text, seen);
    stages_and_ranks(&mut text, seen);
    text
}

fn totals(text: &mut String, seen: &Snapshot) {
    let totals = &seen.totals;
    for (name, help, value) in [
        (
            "chunks_total",
            "Chunks that are done.",
            totals.chunks as f64,
        ),
        (
            "frames_total",
            "Frames that the sink took.",
            totals.frames as f64,
        ),
        (
            "dropped_chunks_total",
            "Chunks that a hard cut overtook.",
            totals.dropped as f64,
        ),
        (
            "late_chunks_total",
            "Chunks that came later than the latency that was asked for.",
            totals.late as f64,
        ),
        (
            "skipped_frames_total",
            "Frames that were dropped by lateness.",
            totals.skipped_frames as f64,
        ),
        (
            "saved_steps_total",
            "Denoising steps that were left out to keep up.",
            totals.steps_saved as f64,
        ),
        (
            "held_back_seconds_total",
            "How long the reader was held back.",
            totals.held_back_ms / 1e3,
        ),
        (
            "source_bytes_total",
            "Payload bytes that the source sent.",
            totals.source_bytes as f64,
        ),
        (
            "restarts_total",
            "Ranks that were lost while chunks were left.",
            totals.restarts as f64,
        ),
        (
            "lost_records_total",
            "Chunks that no figure here speaks of.",
            totals.lost_records as f64,
        ),
    ] {
        family(text, name, "counter", help, one(Some(value)));
    }
}

fn recent(text: &mut String, seen: &Snapshot) {
    let recent = &seen.recent;
    for (name, help, ms) in [
        (
            "period_seconds",
            "Median distance of two accepted chunks.",
            recent.period_ms,
        ),
        (
            "latency_median_seconds",
            "From the first frame of a chunk until it is accepted: the median.",
            recent.latency_ms,
        ),
        (
            "latency_p99_seconds",
            "The 99th percentile of the latency.",
            recent.latency_p99_ms,
        ),
        (
            "latency_max_seconds",
            "The longest latency.",
            recent.latency_max_ms,
        ),
        (
            "added_latency_median_seconds",
            "The part of the latency after the last frame of the chunk: the median.",
            recent.added_latency_ms,
        ),
        (
            "added_latency_p99_seconds",
            "The 99th percentile of the added latency.",
            recent.added_latency_p99_ms,
        ),
    ] {
        gauge(text, name, help, one(ms.map(|ms| ms / 1e3)));
    }
    for (name, help, chunks) in [
        (
            "source_queue_chunks",
            "Chunks that wait before the source.",
            recent.source_queue,
        ),
        (
            "sink_queue_chunks",
            "Chunks that wait behind the sink.",
            recent.sink_queue,
        ),
        ("in_flight_chunks", "Chunks in flight.", recent.in_flight),
    ] {
        gauge(text, name, help, one(chunks.map(f64::from)));
    }
}

fn training(text: &mut String, seen: &Snapshot) {
    let Some(training) = &seen.training else {
        return;
    };
    let steps = one(Some(training.steps as f64));
    let help = "Training steps that moved the weights.";
    family(text, "training_steps_total", "counter", help, steps);
    let help = "The loss of the last step.";
    gauge(text, "training_loss", help, one(training.loss));
    let help =
        "The share of the time of all ranks in the last step in which no action was at work.";
    gauge(text, "training_bubble_ratio", help, one(training.bubble));
}

fn stages_and_ranks(text: &mut String, seen: &Snapshot) {
    let stages = |of: fn(&StageView) -> Option<f64>| {
        let sample = move |stage: &StageView| (label("stage", &stage.stage), of(stage));
        seen.stages.iter().map(sample).collect::<Vec<Sample>>()
    };
    gauge(
        text,
        "stage_work_seconds",
        "Median work of a stage on a chunk.",
        stages(|stage| Some(stage.work_ms? / 1e3)),
    );
    gauge(
        text,
        "stage_wait_seconds",
        "Median wait of a stage for a chunk.",
        stages(|stage| Some(stage.idle_ms? / 1e3)),
    );
    gauge(
        text,
        "stage_idle_ratio",
        "The share of the time that a stage waits.",
        stages(|stage| stage.idle_share),
    );
    let ranks = |of: fn(&RankView) -> Option<f64>| {
        let sample = move |rank: &RankView| (label("rank", &rank.rank.to_string()), of(rank));
        seen.ranks.iter().map(sample).collect::<Vec<Sample>>()
    };
    for (name, help, samples) in [
        (
            "rank_idle_ratio",
            "The share of the time in which the stages of a rank have no work.",
            ranks(|rank| rank.idle_share),
        ),
        (
            "rank_queue_chunks",
            "Chunks that wait for the stages of a rank.",
            ranks(|rank| Some(rank.queued? as f64)),
        ),
        (
            "rank_resident_memory_bytes",
            "Memory of a rank on its host.",
            ranks(|rank| Some(rank.resident_bytes? as f64)),
        ),
        (
            "rank_device_memory_bytes",
            "All memory of the device of a rank.",
            ranks(|rank| Some(rank.device_total_bytes? as f64)),
        ),
        (
            "rank_device_free_memory_bytes",
            "Free memory of the device of a rank.",
            ranks(|rank| Some(rank.device_free_bytes? as f64)),
        ),
    ] {
        gauge(text, name, help, samples);
    }
}

fn one(value: Option<f64>) -> [Sample; 1] {
    [(String::new(), value)]
}

fn gauge(text: &mut String, name: &str, help: &str, samples: impl IntoIterator<Item = Sample>) {
    family(text, name, "gauge", help, samples);
}

fn family(
    text: &mut String,
    name: &str,
    kind: &str,
    help: &str,
    samples: impl IntoIterator<Item = Sample>,
) {
    let known = samples
        .into_iter()
        .filter_map(|(labels, value)| Some((labels, value?)));
    let mut known = known.filter(|(_, value)| value.is_finite()).peekable();
    if known.peek().is_none() {
        return;
    }
    let _ = write!(text, "# HELP pp_{name} {help}\n# TYPE pp_{name} {kind}\n");
    for (labels, value) in known {
        let labels = if labels.is_empty() {
            labels
        } else {
            format!("{{{labels}}}")
        };
        let _ = writeln!(text, "pp_{name}{labels} {value}");
    }
}

fn label(name: &str, value: &str) -> String {
    let value = value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

#[cfg(test)]
mod tests {
    use pp_job::seen::{AboutJob, RecentFigures, RunTotals, TrainingView};

    use super::*;

    #[test]
    fn units_are_base_units_and_what_is_unknown_is_left_out() {
        let seen = Snapshot {
            job: AboutJob {
                program: "a\"b\\\n".into(),
                ..AboutJob::default()
            },
            state: JobState::Running,
            totals: RunTotals {
                chunks: 7,
                held_back_ms: 1500.0,
                ..RunTotals::default()
            },
            recent: RecentFigures {
                period_ms: Some(2.0),
                ..RecentFigures::default()
            },
            stages: vec![StageView {
                stage: "a 1/2".into(),
                idle_share: Some(0.25),
                ..StageView::default()
            }],
            ranks: vec![RankView {
                rank: 3,
                resident_bytes: Some(4096),
                ..RankView::default()
            }],
            training: Some(TrainingView {
                steps: 9,
                loss: Some(0.5),
                ..TrainingView::default()
            }),
            ..Snapshot::default()
        };
        let text = text(&seen);
        for line in [
            r#"pp_job_info{program="a\"b\\\n",pipeline="",version=""} 1"#,
            r#"pp_job_state{state="running"} 1"#,
            r#"pp_job_state{state="ended"} 0"#,
            "# TYPE pp_chunks_total counter",
            "pp_chunks_total 7",
            "pp_held_back_seconds_total 1.5",
            "# TYPE pp_period_seconds gauge",
            "pp_period_seconds 0.002",
            r#"pp_stage_idle_ratio{stage="a 1/2"} 0.25"#,
            r#"pp_rank_resident_memory_bytes{rank="3"} 4096"#,
            "# TYPE pp_training_steps_total counter",
            "pp_training_steps_total 9",
            "pp_training_loss 0.5",
        ] {
            assert!(
                text.lines().any(|has| has == line),
                "{line} is not in {text}"
            );
        }
        assert!(
            !["pp_latency", "pp_stage_work", "pp_training_bubble"]
                .iter()
                .any(|name| text.contains(name)),
            "{text}"
        );
    }
}
