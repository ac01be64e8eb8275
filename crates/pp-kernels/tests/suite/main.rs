//! The kernels on a processor and, on a driver that is not real, on a device. `plugin` and `gpu_oracle` are programs of
//! their own: one runs under a sanitizer, the other on real devices.

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "a device needs more")]
#[path = "../gpu_oracle/device.rs"]
mod device;
#[path = "../gpu_oracle/either.rs"]
mod either;

mod abi_layout;
mod bad_device;
mod check_device;
mod cust;
mod denoiser;
mod group_order;
mod group_overlap;
mod spaces;

use pp_fakes::{Fakes, Loaded};
use pp_testing::Folder;

/// The fakes in the process of this test alone, and the folder of its recording.
fn recorded(test: &str) -> (&'static Loaded, Folder) {
    let loaded = Fakes::newest().load();
    let records = Folder::new(env!("CARGO_TARGET_TMPDIR"), test);
    loaded.set("RECORD", records.path().to_str().unwrap());
    (loaded, records)
}
