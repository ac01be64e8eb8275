//! `NCCL_CONFIG_INITIALIZER`, which is a macro over a C initializer and therefore out of reach for a generator.

use std::ffi::c_int;
use std::ptr;

use crate::bindings::{NCCL_VERSION_CODE, ncclConfig_t};

/// What NCCL looks for in a config to see that it was initialized.
pub const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// A setting that is left to NCCL: `NCCL_CONFIG_UNDEF_INT`.
pub const UNDEFINED_INT: c_int = c_int::MIN;

impl ncclConfig_t {
    /// Everything left to NCCL. It carries the size and the version of the header, by which an older or newer library
    /// knows which fields it may read.
    pub const INITIALIZER: ncclConfig_t = ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: CONFIG_MAGIC,
        version: NCCL_VERSION_CODE,
        blocking: UNDEFINED_INT,
        cgaClusterSize: UNDEFINED_INT,
        minCTAs: UNDEFINED_INT,
        maxCTAs: UNDEFINED_INT,
        netName: ptr::null(),
        splitShare: UNDEFINED_INT,
        trafficClass: UNDEFINED_INT,
        commName: ptr::null(),
        collnetEnable: UNDEFINED_INT,
        CTAPolicy: UNDEFINED_INT,
        shrinkShare: UNDEFINED_INT,
        nvlsCTAs: UNDEFINED_INT,
        nChannelsPerNetPeer: UNDEFINED_INT,
        nvlinkCentricSched: UNDEFINED_INT,
    };
}
