//! The program `pp`.

use std::process::ExitCode;

fn main() -> ExitCode {
    pp_cli::main()
}
