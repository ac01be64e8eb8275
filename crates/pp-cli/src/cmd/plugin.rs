//! `pp plugin check`.

use std::path::Path;

use pp_contract::FaultKind;
use pp_kernels::KernelSet;
use pp_kernels::check::{Bench, CHECKS};
use pp_runtime::driver::with_source;

use crate::exit::{Failure, print};

/// Loads a plugin, runs every check on it and prints them.
pub(crate) fn check(file: &Path) -> Result<(), Failure> {
    let file_name = file.display();
    let refuse = |why: String| {
        Failure::local(
            FaultKind::Plugin,
            "plugin check",
            format!("{file_name}: {why}"),
        )
    };
    let set = KernelSet::load_untested(file).map_err(|e| refuse(with_source(&e)))?;
    if !set.describe().host {
        return Err(refuse(format!(
            "it loads, and works in GPU memory alone, where nothing is checked here; hold it against the built-in \
             kernels: pp run --transport nccl --kernels {file_name} and --kernels ptx",
        )));
    }
    let bench = Bench::on_host(&set);
    let mut failed = 0;
    for check in &CHECKS {
        match check.run(&bench) {
            Ok(()) => print(&format!("ok    {}\n", check.name()))?,
            Err(reason) => {
                failed += 1;
                print(&format!("FAIL  {}: {reason}\n", check.name()))?;
            }
        }
    }
    match failed {
        0 => Ok(()),
        _ => Err(refuse(format!(
            "{failed} of {} checks failed",
            CHECKS.len()
        ))),
    }
}
