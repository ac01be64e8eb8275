//! `pp top`: the jobs of this user, in a terminal.

use pp_command::env::Env;
use pp_command::print;
use pp_job::output::stdout;
use pp_job::{Config, Error};
use pp_live::Top;

use crate::args::TopArgs;

pub(crate) fn top(args: &TopArgs, env: &Env) -> Result<(), Error> {
    let size = || {
        let is_terminal = rustix::termios::isatty(stdout());
        let size = rustix::termios::tcgetwinsize(stdout());
        let size = size
            .ok()
            .filter(|size| is_terminal && size.ws_col > 0 && size.ws_row > 0)?;
        Some((size.ws_col, size.ws_row))
    };
    let top = Top {
        config: &Config::alone(env.lookup())?,
        pid: args.process,
        json: args.json,
        size: &size,
        print: &print,
    };
    top.run()
}
