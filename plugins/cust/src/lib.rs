//! The PTX kernels through another CUDA library. Not finished.

/// Stands for the kernels to come.
#[unsafe(no_mangle)]
pub extern "C" fn pp_plugin_cust_device_count() -> i32 {
    cust::device::Device::num_devices().map_or(-1, |count| count as i32)
}
