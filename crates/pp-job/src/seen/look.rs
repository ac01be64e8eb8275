//! A snapshot, from records and what else is known.

use std::collections::BTreeMap;

use pp_contract::{Fault, Pipeline, Rank, StageSpec};
use pp_runtime::report::{
    ChunkRecord, Measures, Recorder, Restart, StageMeasures, default_warm_up,
};
use pp_transport::control::Vitals;

use super::snapshot::{
    AboutJob, ChunkView, FaultView, HowEnded, JobState, RankView, RecentFigures, RestartView,
    RunTotals, Snapshot, StageView, TrainingView,
};
use crate::shared::SharedDevice;

/// What a snapshot is made of, beside the records.
pub(super) struct Facts<'a> {
    pub(super) about: &'a AboutJob,
    pub(super) pipeline: &'a Pipeline,
    pub(super) devices: &'a [String],
    pub(super) started_ns: u64,
    pub(super) now_ns: u64,
    pub(super) state: JobState,
    pub(super) ended: Option<&'a (HowEnded, Option<Fault>, u64)>,
    pub(super) forgotten: u64,
    pub(super) restarts: Vec<Restart>,
    pub(super) shared: Vec<SharedDevice>,
    pub(super) vitals: BTreeMap<Rank, (Vitals, u64)>,
    pub(super) lost_records: u64,
    pub(super) training: Option<TrainingView>,
    pub(super) thumbnails: [bool; 2],
}

/// Frames a second are counted over so long.
const COUNTED_NS: u64 = 10_000_000_000;

/// What the job looks like. `kept` has the totals, and medians are over `recent`.
pub(super) fn snapshot(facts: &Facts<'_>, kept: &Recorder, recent: &Recorder) -> Snapshot {
    let totals = kept.totals();
    let measures = Measures::of(recent, default_warm_up(totals.chunks), &facts.restarts);
    let restarts = facts.restarts.iter().map(|restart| RestartView {
        rank: restart.fault.rank.get(),
        sentence: restart.fault.to_string(),
        lost_ns: restart.lost_ns,
        served_ns: restart.served_ns,
    });
    let of_end = facts.ended.and_then(|(_, fault, _)| fault.as_ref());
    let of_loss = facts.restarts.last().map(|restart| &restart.fault);
    let of_loss = of_loss.filter(|_| facts.state == JobState::Restarting);
    let timeline = kept.records().rev().take(Snapshot::CHUNKS).rev();
    Snapshot {
        job: facts.about.clone(),
        state: facts.state,
        ended: facts.ended.map(|(how, _, _)| how.clone()),
        now_ns: facts.now_ns,
        elapsed_s: seconds(facts.now_ns.saturating_sub(facts.started_ns)),
        totals: RunTotals {
            chunks: totals.chunks,
            frames: totals.frames,
            dropped: totals.dropped,
            source_bytes: totals.source_bytes,
            restarts: facts.forgotten + facts.restarts.len() as u64,
            lost_records: facts.lost_records,
            late: totals.late,
            skipped_frames: totals.skipped_frames,
            steps_saved: totals.steps_saved,
            held_back_ms: totals.held_back_ns as f64 / 1e6,
        },
        recent: figures(facts, kept, &measures),
        stages: stages(facts.pipeline, &measures),
        ranks: ranks(facts, &measures),
        restarts: restarts.collect(),
        fault: of_end.or(of_loss).map(fault),
        timeline: timeline
            .map(|record| chunk(facts.pipeline, record))
            .collect(),
        thumbnails: facts.thumbnails,
        training: facts.training.clone(),
    }
}

fn figures(facts: &Facts<'_>, kept: &Recorder, m: &Measures) -> RecentFigures {
    let slowest = m
        .stages
        .iter()
        .filter_map(|stage| Some((stage.work_ms?, stage)))
        .max_by(|(a, _), (b, _)| a.total_cmp(b));
    let latest = kept.records().next_back();
    RecentFigures {
        frames_per_second: frames_per_second(facts, kept),
        period_ms: m.period_ms,
        slowest_stage_ms: slowest.map(|(work, _)| work),
        slowest_stage: slowest.map(|(_, stage)| stage.stage.clone()),
        latency_ms: m.latency_ms,
        latency_p99_ms: m.latency_p99_ms,
        latency_max_ms: m.latency_max_ms,
        added_latency_ms: m.added_latency_ms,
        added_latency_p99_ms: m.added_latency_p99_ms,
        added_latency_max_ms: m.added_latency_max_ms,
        source_queue: latest.map(|record| record.source_queue),
        sink_queue: latest.map(|record| record.sink_queue),
        in_flight: latest.map(|record| record.in_flight),
        behind_ms: latest.and_then(|record| Some(record.behind_ns? as f64 / 1e6)),
    }
}

/// Frames that came after the oldest chunk of the last ten seconds, over the time since then. A job that stands still slows.
fn frames_per_second(facts: &Facts<'_>, kept: &Recorder) -> Option<f64> {
    let accepted = || kept.records().rev().filter(|record| !record.dropped);
    let until_ns = match facts.ended {
        Some(_) => accepted().next()?.accepted_ns,
        None => facts.now_ns,
    };
    let is_late = |record: &&ChunkRecord| record.accepted_ns + COUNTED_NS >= until_ns;
    let counted = accepted().take_while(is_late).count().max(2);
    let since_ns = accepted().take(counted).last()?.accepted_ns;
    let frames = accepted().take(counted - 1).map(|record| record.frames);
    let frames: u64 = frames.map(u64::from).sum();
    let seconds = seconds(until_ns.saturating_sub(since_ns));
    (seconds > 0.0 && accepted().nth(1).is_some()).then(|| frames as f64 / seconds)
}

fn stages(pipeline: &Pipeline, measures: &Measures) -> Vec<StageView> {
    let view = |(spec, stage): (&StageSpec, &StageMeasures)| StageView {
        stage: stage.stage.clone(),
        ranks: spec.ranks.iter().map(|rank| rank.get()).collect(),
        work_ms: stage.work_ms,
        idle_ms: stage.idle_ms,
        idle_share: stage.idle_share,
    };
    let stages = pipeline.stages().iter().zip(&measures.stages);
    stages.map(view).collect()
}

fn ranks(facts: &Facts<'_>, m: &Measures) -> Vec<RankView> {
    let ranks = facts.pipeline.world_size().ranks();
    let view = |rank: Rank| {
        let number = rank.get();
        RankView {
            rank: number,
            device: facts.devices.get(number as usize).cloned(),
            idle_share: busy_ms(m, number)
                .zip(m.period_mean_ms.filter(|period| *period > 0.0))
                .map(|(busy, period)| (1.0 - busy / period).clamp(0.0, 1.0)),
            ..said(facts, rank)
        }
    };
    ranks.map(view).collect()
}

/// What a rank says of itself.
fn said(facts: &Facts<'_>, rank: Rank) -> RankView {
    let Some((vitals, at_ns)) = facts.vitals.get(&rank) else {
        return RankView::default();
    };
    let [free, total] = vitals.device_bytes;
    RankView {
        resident_bytes: Some(vitals.resident_bytes),
        device_free_bytes: (total > 0).then_some(free),
        device_total_bytes: (total > 0).then_some(total),
        queued: Some(vitals.queued),
        said_s: Some(seconds(facts.now_ns.saturating_sub(*at_ns))),
        ..RankView::default()
    }
}

/// The mean work of a rank on a chunk: of the stages that it leads, and for the groups of others.
fn busy_ms(m: &Measures, rank: u32) -> Option<f64> {
    let led = m.ranks.iter().find(|led| led.rank == rank);
    let members = m.stages.iter().filter(|stage| stage.rank != rank);
    let members = members.flat_map(|stage| stage.members.iter().find(|one| one.rank == rank));
    let works = led.into_iter().chain(members);
    let works = works.filter_map(|work| work.work_mean_ms);
    works.fold(None, |sum, work| Some(sum.unwrap_or(0.0) + work))
}

fn fault(fault: &Fault) -> FaultView {
    FaultView {
        kind: fault.kind.to_string(),
        rank: fault.rank.get(),
        operation: fault.operation.to_string(),
        sentence: fault.to_string(),
    }
}

fn chunk(pipeline: &Pipeline, record: &ChunkRecord) -> ChunkView {
    let stages = 0..pipeline.stages().len();
    let times = |at| record.times(at).map(|times| [times.start_ns, times.end_ns]);
    ChunkView {
        chunk_index: record.chunk_index,
        frames: record.frames,
        dropped: record.dropped,
        first_read_ns: record.first_read_ns,
        accepted_ns: record.accepted_ns,
        stages: stages.map(times).collect(),
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
