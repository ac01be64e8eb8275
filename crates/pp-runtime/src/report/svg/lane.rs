//! One lane of the timeline: the stages of a rank, or the payloads of an edge.

use std::io::{self, Write};

use super::scale::{LEFT, RIGHT, Scale, WIDTH, millis};
use crate::report::ChunkRecord;

const STAGE_HEIGHT: f64 = 40.0;
const ROW_HEIGHT: f64 = 13.0;

/// A piece of a lane: what class of thing, in which row, when, and which chunk.
struct Bar {
    class: &'static str,
    row: usize,
    from_ns: u64,
    to_ns: u64,
    chunk: u64,
}

pub(super) struct Lane {
    name: String,
    note: String,
    bars: Vec<Bar>,
    /// Rows of an edge; 0 for a lane of stages, which is one tall row with its waits hatched.
    pub(super) rows: usize,
}

/// Transfer on the edge forward, and until when the payload then waited.
pub(super) fn forward(r: &ChunkRecord) -> Option<[u64; 3]> {
    r.phase_b
        .map(|b| [r.sent_ns, b.recv_ns, b.compute_start_ns])
}

/// Transfer on the edge back, and until when the payload then waited.
pub(super) fn back(r: &ChunkRecord) -> Option<[u64; 3]> {
    let taken_ns = if r.dropped {
        r.received_ns
    } else {
        r.decode_start_ns
    };
    r.phase_b.map(|b| [b.sent_ns, r.received_ns, taken_ns])
}

impl Lane {
    pub(super) fn front(records: &[&ChunkRecord], scale: &Scale) -> Self {
        let encode = |r: &&ChunkRecord| stage("encode", r, r.build_start_ns, r.build_end_ns);
        let decode = |r: &&ChunkRecord| stage("decode", r, r.decode_start_ns, r.decode_end_ns);
        let bars = records.iter().flat_map(|r| [encode(r), decode(r)]);
        Self::of_stages("front", 0, bars, scale)
    }

    pub(super) fn phase_b(records: &[&ChunkRecord], scale: &Scale, rank: u32) -> Self {
        let bars = records.iter().filter_map(|r| {
            let class = if r.dropped { "dropped" } else { "phase_b" };
            r.phase_b
                .map(|b| stage(class, r, b.compute_start_ns, b.compute_end_ns))
        });
        Self::of_stages("phase B", rank, bars, scale)
    }

    fn of_stages(name: &str, rank: u32, bars: impl Iterator<Item = Bar>, scale: &Scale) -> Self {
        let mut bars: Vec<Bar> = bars.filter(|b| scale.shows(b.from_ns, b.to_ns)).collect();
        bars.sort_by_key(|b| b.from_ns);
        let busy_ns: f64 = bars
            .iter()
            .map(|b| (b.to_ns.min(scale.to_ns) - b.from_ns.max(scale.from_ns)) as f64)
            .sum();
        let busy = 100.0 * busy_ns / scale.length_ns() as f64;
        Self {
            name: format!("rank {rank}, {name}"),
            note: if bars.is_empty() {
                "no times known".into()
            } else {
                format!("busy {busy:.0} %")
            },
            bars,
            rows: 0,
        }
    }

    pub(super) fn edge(
        records: &[&ChunkRecord],
        scale: &Scale,
        (from, to): (u32, u32),
        times: fn(&ChunkRecord) -> Option<[u64; 3]>,
    ) -> Self {
        let mut bars = Vec::new();
        let mut row_ends: Vec<u64> = Vec::new();
        for r in records {
            let Some([sent_ns, arrived_ns, taken_ns]) = times(r) else {
                continue;
            };
            let end_ns = arrived_ns.max(taken_ns);
            if !scale.shows(sent_ns, end_ns) {
                continue;
            }
            // The first row that is free again, as the chunk takes the first slot that is.
            let row = row_ends
                .iter()
                .position(|&end| end <= sent_ns)
                .unwrap_or(row_ends.len());
            row_ends.resize(row_ends.len().max(row + 1), 0);
            row_ends[row] = end_ns;
            for (class, from_ns, to_ns) in [
                ("slot", arrived_ns, taken_ns),
                ("transfer", sent_ns, arrived_ns),
            ] {
                bars.push(Bar {
                    class,
                    row,
                    from_ns,
                    to_ns,
                    chunk: r.chunk_index,
                });
            }
        }
        Self {
            name: format!("{from} → {to}"),
            note: String::new(),
            bars,
            rows: row_ends.len().max(1),
        }
    }

    pub(super) fn height(&self) -> f64 {
        if self.rows == 0 {
            STAGE_HEIGHT
        } else {
            self.rows as f64 * ROW_HEIGHT + 6.0
        }
    }

    pub(super) fn draw(&self, out: &mut impl Write, scale: &Scale, y: f64) -> io::Result<()> {
        let height = self.height();
        let middle = y + height / 2.0;
        writeln!(
            out,
            "<rect class=\"lane\" x=\"{LEFT}\" y=\"{y}\" width=\"{}\" height=\"{height}\" rx=\"3\"/>",
            WIDTH - LEFT - RIGHT
        )?;
        let name_y = if self.note.is_empty() {
            middle + 4.0
        } else {
            middle - 3.0
        };
        writeln!(
            out,
            "<text class=\"end\" x=\"{}\" y=\"{name_y}\">{}</text>",
            LEFT - 10.0,
            self.name
        )?;
        writeln!(
            out,
            "<text class=\"small end\" x=\"{}\" y=\"{}\">{}</text>",
            LEFT - 10.0,
            middle + 13.0,
            self.note
        )?;
        if self.rows == 0 {
            self.draw_waits(out, scale, y)?;
        }
        for bar in &self.bars {
            bar.draw(out, scale, y, self.rows)?;
        }
        Ok(())
    }

    /// Hatches what lies between the stages of the lane.
    fn draw_waits(&self, out: &mut impl Write, scale: &Scale, y: f64) -> io::Result<()> {
        let mut free_from_ns = scale.from_ns;
        let lane_end = Bar {
            class: "",
            row: 0,
            from_ns: scale.to_ns,
            to_ns: scale.to_ns,
            chunk: 0,
        };
        for bar in self.bars.iter().chain([&lane_end]) {
            let (x0, x1) = (scale.x(free_from_ns), scale.x(bar.from_ns));
            if bar.from_ns > free_from_ns && x1 - x0 >= 1.0 {
                let waited_ns = bar.from_ns - free_from_ns;
                writeln!(
                    out,
                    "<rect class=\"idle\" x=\"{x0:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>idle {}</title></rect>",
                    y + 4.0,
                    x1 - x0,
                    STAGE_HEIGHT - 8.0,
                    millis(waited_ns)
                )?;
                if x1 - x0 > 84.0 {
                    let middle = (x0 + x1) / 2.0;
                    writeln!(
                        out,
                        "<rect class=\"lane\" x=\"{:.1}\" y=\"{:.1}\" width=\"76\" height=\"16\" rx=\"3\"/>\
                         <text class=\"small mid\" x=\"{middle:.1}\" y=\"{:.1}\">idle {}</text>",
                        middle - 38.0,
                        y + STAGE_HEIGHT / 2.0 - 8.0,
                        y + STAGE_HEIGHT / 2.0 + 4.0,
                        millis(waited_ns)
                    )?;
                }
            }
            free_from_ns = free_from_ns.max(bar.to_ns);
        }
        Ok(())
    }
}

fn stage(class: &'static str, r: &ChunkRecord, from_ns: u64, to_ns: u64) -> Bar {
    Bar {
        class,
        row: 0,
        from_ns,
        to_ns,
        chunk: r.chunk_index,
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
        let x = scale.x(self.from_ns);
        // A hand-over in shared memory takes microseconds; it must not vanish.
        let least = if self.class == "transfer" { 2.0 } else { 0.0 };
        let width = (scale.x(self.to_ns) - x).max(least);
        let (y, height) = match rows {
            0 => (lane_y + 4.0, STAGE_HEIGHT - 8.0),
            _ => (
                lane_y + 4.0 + self.row as f64 * ROW_HEIGHT,
                ROW_HEIGHT - 3.0,
            ),
        };
        // Bars that touch keep a hairline between them.
        let drawn = if rows == 0 {
            (width - 0.8).max(0.6)
        } else {
            width
        };
        writeln!(
            out,
            "<rect class=\"{}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{drawn:.1}\" height=\"{height:.1}\"><title>{} {}, {}</title></rect>",
            self.class,
            self.class,
            self.chunk,
            millis(self.to_ns.saturating_sub(self.from_ns))
        )?;
        let digits = self.chunk.checked_ilog10().unwrap_or(0) + 1;
        if rows == 0 && width > 3.0 + 6.5 * f64::from(digits) {
            writeln!(
                out,
                "<text class=\"num\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                x + width / 2.0,
                y + height / 2.0 + 4.0,
                self.chunk
            )?;
        }
        Ok(())
    }
}
