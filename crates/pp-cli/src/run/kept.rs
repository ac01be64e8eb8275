//! What a run keeps of an output that is not finished.

use std::time::SystemTime;

use pp_job::command_line::say;
use pp_job::output::kept_name;

use super::Checked;
use crate::args::{CutChoice, RunArgs};

/// Cuts what a job that has ended early kept to whole frames, and says how to go on: once, by the supervisor, or by the
/// process of the sink.
pub(super) fn tell(args: &RunArgs, checked: &Checked, began: SystemTime) {
    let (config, sink) = (&checked.config, checked.pipeline.sink());
    let is_elsewhere = config.rank().is_some_and(|own| own != sink);
    let target = args.output.as_deref();
    let target = target.filter(|_| args.going_on.keep_partial);
    let Some((target, path)) = target.and_then(|target| Some((target, kept_name(target)?))) else {
        return;
    };
    if config.is_supervised() || is_elsewhere {
        return;
    }
    // A job that was to go on in it, and was refused, has written nothing: its error says more.
    let written = path.metadata().and_then(|about| about.modified());
    if args.going_on.skip > 0 && written.map_or(true, |written| written < began) {
        return;
    }
    let path = path.display();
    say(match pp_video::kept::cut(target) {
        Ok(None) => return,
        // Where --skip is refused, and where its number is not that of the frames that are kept.
        Ok(Some((frames, _))) if args.cuts == CutChoice::Hard || args.live.has_gaps() => {
            format!("pp: {path}: {frames} whole frames are kept")
        }
        Ok(Some((frames, per_frame))) => {
            let skip = frames / per_frame;
            format!(
                "pp: {path}: {frames} whole frames are kept; the same command with --skip {skip} goes on in it"
            )
        }
        Err(error) => format!("pp: {path}: what is kept cannot be cut to whole frames: {error}"),
    });
}
