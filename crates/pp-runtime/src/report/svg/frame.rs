//! What all pictures share: head, legend, axis, colours.

use std::io::{self, Write};

use super::scale::{LEFT, RIGHT, Scale, WIDTH};

/// Where the first lane begins.
pub(super) const TOP: f64 = 110.0;
pub(super) const LANE_GAP: f64 = 14.0;
const LEGEND: f64 = 95.0;

const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;font-size:12px;fill:#1f2328}\
.bg{fill:#ffffff}.lane{fill:#f3f4f6}.grid{stroke:#d8dce1;stroke-width:1}\
.title{font-size:17px;font-weight:600}.dim,.small{fill:#59636e}.small{font-size:11px}\
.num{fill:#ffffff;font-size:11px;font-weight:600;text-anchor:middle}.mid{text-anchor:middle}.end{text-anchor:end}\
.source{fill:#2f6fb5}.sink{fill:#2c8a5b}.dropped{fill:#8a929c}\
.stage0{fill:#c2621b}.stage1{fill:#a8327e}.stage2{fill:#7a7420}.stage3{fill:#1b8089}\
.transfer{fill:#6b4fa3}.slot{fill:#cfc5e6}.lost{fill:#c0392b;fill-opacity:.3}\
.hatch{stroke:#c0392b;stroke-width:1.4;opacity:.55}.idle{fill:url(#idle)}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.bg{fill:#0d1117}.lane{fill:#171c24}.grid{stroke:#2b323b}\
.dim,.small{fill:#9198a1}.num{fill:#ffffff}.slot{fill:#413566}.transfer{fill:#9a7fd6}}";

/// Begins a picture with a title and two lines of text.
pub(super) fn write_head(
    out: &mut impl Write,
    height: f64,
    title: &str,
    lines: &[String; 2],
) -> io::Result<()> {
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n\
         <defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <line class=\"hatch\" x1=\"0\" y1=\"0\" x2=\"0\" y2=\"6\"/></pattern></defs>\n\
         <rect class=\"bg\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>\n\
         <text class=\"title\" x=\"20\" y=\"32\">{title}</text>\n\
         <text class=\"dim\" x=\"20\" y=\"53\">{}</text>\n\
         <text class=\"dim\" x=\"20\" y=\"71\">{}</text>",
        lines[0],
        lines[1],
        title = escape(title),
    )
}

/// Writes what the colours mean, and a note at the right.
pub(super) fn write_legend(
    out: &mut impl Write,
    entries: &[(&str, &str)],
    note: &str,
) -> io::Result<()> {
    let mut x = LEFT;
    for (class, label) in entries {
        writeln!(
            out,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{}\" width=\"16\" height=\"11\" rx=\"2\"/>\
             <text class=\"small\" x=\"{}\" y=\"{LEGEND}\">{label}</text>",
            LEGEND - 10.0,
            x + 22.0
        )?;
        x += 46.0 + 6.4 * label.len() as f64;
    }
    writeln!(
        out,
        "<text class=\"small end\" x=\"{}\" y=\"{LEGEND}\">{note}</text>",
        WIDTH - RIGHT
    )
}

/// Writes the lines of the time axis, down to `bottom`.
pub(super) fn write_axis(out: &mut impl Write, scale: &Scale, bottom: f64) -> io::Result<()> {
    let step = tick(scale.length());
    for at in (0..=scale.length() / step).map(|count| count * step) {
        let x = scale.x(scale.from + at);
        writeln!(
            out,
            "<line class=\"grid\" x1=\"{x:.1}\" y1=\"{}\" x2=\"{x:.1}\" y2=\"{bottom}\"/>\
             <text class=\"small mid\" x=\"{x:.1}\" y=\"{}\">{}</text>",
            TOP - 6.0,
            bottom + 16.0,
            scale.unit.mark(at)
        )?;
    }
    writeln!(
        out,
        "<text class=\"small end\" x=\"{}\" y=\"{}\">{}</text>",
        LEFT - 10.0,
        bottom + 16.0,
        scale.unit.name()
    )
}

/// Distance of the ticks: 1, 2 or 5 times a power of ten, so that there are between 5 and 13 of them.
fn tick(length: u64) -> u64 {
    let least = (length / 12).max(1);
    let power = 10u64.pow(least.ilog10());
    [1, 2, 5]
        .map(|factor| power.saturating_mul(factor))
        .into_iter()
        .find(|&step| step >= least)
        .unwrap_or_else(|| power.saturating_mul(10))
}

/// The text as it may stand in a picture.
pub(super) fn escape(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '<' => "&lt;".into(),
            '>' => "&gt;".into(),
            '&' => "&amp;".into(),
            '"' => "&quot;".into(),
            c if c.is_control() => " ".into(),
            c => c.to_string(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(tick(1_000_000), 100_000);
        assert_eq!(tick(50_000_000), 5_000_000);
        assert_eq!(tick(100_000_000), 10_000_000);
        for length in [1, 999, 123_456_789, u64::MAX] {
            let ticks = length / tick(length) + 1;
            assert!((2..=13).contains(&ticks), "{ticks} ticks over {length} ns");
        }
    }
}
