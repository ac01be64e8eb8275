//! Threads that must run while a library is loaded.

use anyhow::Context as _;

use crate::error::Error;

/// Starts a thread and waits until it works. A thread takes a lock of the C library's loader when it begins: without the
/// wait one that comes to run late would stand still while a library is loaded, however long that takes.
pub(crate) fn start_thread(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    let (begins, begun) = crossbeam_channel::bounded(1);
    let thread = std::thread::Builder::new().name(name.into());
    thread.spawn(move || {
        let _ = begins.send(());
        work();
    })?;
    // An error is a thread that has ended already.
    let _ = begun.recv();
    Ok(())
}

/// Starts a thread.
///
/// # Errors
/// None is to be had.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let thread = std::thread::Builder::new().name(name.into());
    thread.spawn(work).context("cannot start a thread")?;
    Ok(())
}
