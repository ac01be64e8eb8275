//! `pp plugin check`.

use std::path::Path;

use pp_contract::{Fault, FaultKind};
use pp_kernels::KernelSet;
use pp_kernels::check::check as check_plugin;

use crate::exit::{Failure, print};
use crate::job::FRONT;

/// Loads a plugin, runs every check on it and prints them.
pub(crate) fn check(file: &Path) -> Result<(), Failure> {
    if let Ok(kernels) = KernelSet::load(file)
        && !kernels.describe().host
    {
        let text = format!(
            "{}: it loads, and works in GPU memory alone, where nothing is checked here; hold it \
             against the built-in kernels: pp run --transport nccl --kernels {} and --kernels ptx",
            file.display(),
            file.display()
        );
        return Err(Fault::new(FaultKind::Plugin, FRONT, "plugin check", text).into());
    }
    let report = check_plugin(file);
    print(&report.to_string())?;
    if report.passed() {
        return Ok(());
    }
    let failed = report.checks.iter().filter(|c| c.outcome.is_err()).count();
    let text = format!(
        "{}: {failed} of {} checks failed",
        file.display(),
        report.checks.len()
    );
    Err(Fault::new(FaultKind::Plugin, FRONT, "plugin check", text).into())
}
