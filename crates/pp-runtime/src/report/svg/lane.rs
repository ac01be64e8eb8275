//! One lane of the timeline: the stages of a rank, or the payloads of an edge.

use std::io::{self, Write};

use pp_contract::{Pipeline, Rank};

use super::scale::{LEFT, RIGHT, Scale, WIDTH};
use crate::report::ChunkRecord;

const STAGE_HEIGHT: f64 = 40.0;
const ROW_HEIGHT: f64 = 13.0;
/// Letters of a name that fit beside a lane.
const NAME_FITS: usize = 18;

/// A piece of a lane: what class of thing, in which row, when, and which chunk or microbatch.
pub(super) struct Bar {
    pub(super) class: &'static str,
    pub(super) row: usize,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) number: u64,
    /// What it is, in words.
    pub(super) title: String,
}

/// What is written beside a row.
pub(super) struct Row {
    pub(super) name: String,
    pub(super) note: String,
}

pub(super) struct Lane {
    /// Of an edge only one.
    pub(super) names: Vec<Row>,
    /// In the order of their beginnings.
    pub(super) bars: Vec<Bar>,
    /// Rows of an edge; 0 for a lane of stages, whose rows are tall, with the waits of the rank hatched over all of them.
    pub(super) rows: usize,
    /// What is idle is hatched until then, if at all.
    pub(super) until: Option<u64>,
}

impl Lane {
    /// The stages that a rank runs, alone or as a member of a group.
    pub(super) fn rank(
        records: &[&ChunkRecord],
        scale: &Scale,
        pipeline: &Pipeline,
        rank: Rank,
    ) -> Self {
        let (mut names, mut bars) = (Vec::new(), Vec::new());
        for (row, (at, stage)) in pipeline.stages_at(rank).enumerate() {
            let first = bars.len();
            let place = stage.ranks.iter().take_while(|of| **of != rank).count();
            for r in records {
                let Some((from_ns, to_ns)) = r.rank_times(at, place) else {
                    continue;
                };
                if scale.shows(from_ns, to_ns) {
                    bars.push(Bar {
                        class: class(at, pipeline.stages().len(), r.dropped),
                        row,
                        from: from_ns,
                        to: to_ns,
                        number: r.chunk_index,
                        title: format!("{} {}", stage.label(), r.chunk_index),
                    });
                }
            }
            let shown = |b: &Bar| b.to.min(scale.to) - b.from.max(scale.from);
            let busy_ns: f64 = bars[first..].iter().map(|b| shown(b) as f64).sum();
            let busy = 100.0 * busy_ns / scale.length() as f64;
            names.push(Row {
                name: stage.label(),
                note: format!("rank {rank}, busy {busy:.0} %"),
            });
        }
        bars.sort_by_key(|b| b.from);
        Self {
            names,
            bars,
            rows: 0,
            until: Some(scale.to),
        }
    }

    /// The payloads on their way to a stage.
    pub(super) fn edge(
        records: &[&ChunkRecord],
        scale: &Scale,
        pipeline: &Pipeline,
        to: usize,
    ) -> Self {
        let mut bars = Vec::new();
        let mut row_ends: Vec<u64> = Vec::new();
        for r in records {
            let Some([left_ns, arrived_ns, taken_ns]) = r.transfer_ns(to) else {
                continue;
            };
            let end_ns = arrived_ns.max(taken_ns);
            if !scale.shows(left_ns, end_ns) {
                continue;
            }
            // The first row that is free again, as the chunk takes the first slot that is.
            let row = row_ends
                .iter()
                .position(|&end| end <= left_ns)
                .unwrap_or(row_ends.len());
            row_ends.resize(row_ends.len().max(row + 1), 0);
            row_ends[row] = end_ns;
            for (class, from_ns, to_ns) in [
                ("slot", arrived_ns, taken_ns),
                ("transfer", left_ns, arrived_ns),
            ] {
                bars.push(Bar {
                    class,
                    row,
                    from: from_ns,
                    to: to_ns,
                    number: r.chunk_index,
                    title: format!("{class} {}", r.chunk_index),
                });
            }
        }
        let [from, to] = [to - 1, to].map(|at| pipeline.stages()[at].leader());
        Self {
            names: vec![Row {
                name: format!("{from} → {to}"),
                note: String::new(),
            }],
            bars,
            rows: row_ends.len().max(1),
            until: None,
        }
    }

    pub(super) fn height(&self) -> f64 {
        match self.rows {
            0 => self.names.len() as f64 * STAGE_HEIGHT,
            rows => rows as f64 * ROW_HEIGHT + 6.0,
        }
    }

    pub(super) fn draw(&self, out: &mut impl Write, scale: &Scale, y: f64) -> io::Result<()> {
        let height = self.height();
        writeln!(
            out,
            "<rect class=\"lane\" x=\"{LEFT}\" y=\"{y}\" width=\"{}\" height=\"{height}\" rx=\"3\"/>",
            WIDTH - LEFT - RIGHT
        )?;
        let row_height = height / self.names.len() as f64;
        for (row, Row { name, note, .. }) in self.names.iter().enumerate() {
            let middle = y + (row as f64 + 0.5) * row_height;
            let name_y = middle + if note.is_empty() { 4.0 } else { -3.0 };
            let squeezed = match name.chars().count() > NAME_FITS {
                true => format!(
                    " textLength=\"{}\" lengthAdjust=\"spacingAndGlyphs\"",
                    LEFT - 20.0
                ),
                false => String::new(),
            };
            writeln!(
                out,
                "<text class=\"end\" x=\"{x}\" y=\"{name_y}\"{squeezed}>{name}</text>\
                 <text class=\"small end\" x=\"{x}\" y=\"{}\">{note}</text>",
                middle + 13.0,
                x = LEFT - 10.0
            )?;
        }
        if let Some(until) = self.until {
            self.draw_waits(out, scale, y, until)?;
        }
        for bar in &self.bars {
            bar.draw(out, scale, y, self.rows)?;
        }
        Ok(())
    }

    /// Hatches what lies between the works of the rank.
    fn draw_waits(
        &self,
        out: &mut impl Write,
        scale: &Scale,
        y: f64,
        until: u64,
    ) -> io::Result<()> {
        let mut free_from = scale.from;
        let bars = self.bars.iter().map(|bar| (bar.from, bar.to));
        for (from, to) in bars.chain([(until, until)]) {
            let (x0, x1) = (scale.x(free_from), scale.x(from));
            if from > free_from && x1 - x0 >= 1.0 {
                let waited = scale.unit.length(from - free_from);
                writeln!(
                    out,
                    "<rect class=\"idle\" x=\"{x0:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>idle {}</title></rect>",
                    y + 4.0,
                    x1 - x0,
                    self.height() - 8.0,
                    waited
                )?;
                if x1 - x0 > 84.0 {
                    let (middle, middle_y) = ((x0 + x1) / 2.0, y + self.height() / 2.0);
                    writeln!(
                        out,
                        "<rect class=\"lane\" x=\"{:.1}\" y=\"{:.1}\" width=\"76\" height=\"16\" rx=\"3\"/>\
                         <text class=\"small mid\" x=\"{middle:.1}\" y=\"{:.1}\">idle {}</text>",
                        middle - 38.0,
                        middle_y - 8.0,
                        middle_y + 4.0,
                        waited
                    )?;
                }
            }
            free_from = free_from.max(to);
        }
        Ok(())
    }
}

/// The colour of a stage: the source and the sink have their own, those between them take turns.
fn class(at: usize, stages: usize, is_dropped: bool) -> &'static str {
    const BETWEEN: [&str; 4] = ["stage0", "stage1", "stage2", "stage3"];
    match at {
        0 => "source",
        _ if is_dropped => "dropped",
        _ if at + 1 == stages => "sink",
        _ => BETWEEN[(at - 1) % BETWEEN.len()],
    }
}

impl Bar {
    fn draw(
        &self,
        out: &mut impl Write,
        scale: &Scale,
        lane_y: f64,
        rows: usize,
    ) -> io::Result<()> {
        let x = scale.x(self.from);
        // A hand-over in shared memory takes microseconds; it must not vanish.
        let least = if self.class == "transfer" { 2.0 } else { 0.0 };
        let width = (scale.x(self.to) - x).max(least);
        let (row_height, gap) = match rows {
            0 => (STAGE_HEIGHT, 8.0),
            _ => (ROW_HEIGHT, 3.0),
        };
        let y = lane_y + 4.0 + self.row as f64 * row_height;
        let height = row_height - gap;
        // Bars that touch keep a hairline between them.
        let drawn = match rows {
            0 => (width - 0.8).max(0.6),
            _ => width,
        };
        writeln!(
            out,
            "<rect class=\"{}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{drawn:.1}\" height=\"{height:.1}\"><title>{}, {}</title></rect>",
            self.class,
            self.title,
            scale.unit.length(self.to.saturating_sub(self.from))
        )?;
        let digits = self.number.checked_ilog10().unwrap_or(0) + 1;
        if rows == 0 && width > 3.0 + 6.5 * f64::from(digits) {
            writeln!(
                out,
                "<text class=\"num\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                x + width / 2.0,
                y + height / 2.0 + 4.0,
                self.number
            )?;
        }
        Ok(())
    }
}
