//! The Rust half of the Python package `pp_pipeline`: slots as memory, stages as calls, and a job with its caller.
//!
//! Hazard: a tensor in Python outlives the slot that it shows, and a thread that waits for Python's lock (the GIL) holds up
//! the job. Guarantee: what Python gets keeps its memory mapped, whatever becomes of the edge; the watchdog and the lanes never
//! take that lock, and the driver takes it for the calls of stages, and to wake a coroutine that waits for it.
//!
//! Choices: the tensors are made in Python, where NumPy and PyTorch are. Here are addresses, layouts and queues.

mod error;
mod flow;
mod group;
mod job;
mod medium;
mod memory;
mod schedule;
mod source;
mod stages;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<memory::Layout>()?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<memory::Window>()?;
    module.add_class::<flow::Flow>()?;
    module.add_class::<flow::Hold>()?;
    module.add_class::<flow::Stream>()?;
    module.add_class::<group::Member>()?;
    module.add_class::<job::Running>()?;
    module.add_class::<schedule::Schedule>()?;
    module.add_function(wrap_pyfunction!(job::begin, module)?)?;
    module.add_function(wrap_pyfunction!(job::stages, module)?)?;
    module.add_function(wrap_pyfunction!(job::default_depth, module)?)?;
    module.add_function(wrap_pyfunction!(job::place, module)?)?;
    module.add_function(wrap_pyfunction!(job::rest, module)?)?;
    module.add("EndError", module.py().get_type::<error::EndError>())?;
    Ok(())
}
