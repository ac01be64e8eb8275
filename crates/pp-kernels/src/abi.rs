//! The Rust mirror of `include/pp_kernel.h`.
//!
//! Hazard: two compilers must agree on every offset, or a call reads garbage. So every struct is `repr(C)`, holds only
//! integers of fixed width, `f32` and pointers, and its size and key offsets are asserted below; a test compiles the
//! same assertions against the C header, generated from this file's `offset_of!`.
//!
//! Field meanings are documented once, in the header; the names here are the same.

#![allow(missing_docs)] // the header documents the fields; two copies of the words would drift apart

use std::ffi::c_void;
use std::mem::{offset_of, size_of};

use pp_contract::{DType, MAX_CONTEXT_GAPS};

/// "PPKRNLS2" in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PPKRNLS2");
/// A table of another major version is refused.
pub const MAJOR: u16 = 2;
/// Raised when an entry or a field is appended, or what was open is settled.
pub const MINOR: u16 = 4;
/// Most stages of a plugin.
pub const MAX_STAGES: usize = 16;
/// Most tensors in one payload.
pub const MAX_TENSORS: usize = 16;
/// Every tensor of a payload starts at a multiple of this.
pub const TENSOR_ALIGN: u64 = 256;
/// The exported function, NUL-terminated for the dynamic linker.
pub const ENTRY_SYMBOL: &[u8] = b"pp_kernels_entry_v2\0";
/// What a plugin of version 1 exported.
pub const OLD_ENTRY_SYMBOL: &[u8] = b"pp_kernels_entry_v1\0";

pub const OK: u32 = 0;
pub const ERROR: u32 = 1;
pub const INVALID_ARGUMENT: u32 = 2;
pub const UNSUPPORTED: u32 = 3;
pub const OUT_OF_MEMORY: u32 = 4;
pub const PANIC: u32 = 5;

pub const SPACE_HOST: u32 = 0;
pub const SPACE_CUDA: u32 = 1;

pub const STAGE_SOURCE: u32 = 0;
pub const STAGE_MIDDLE: u32 = 1;
pub const STAGE_SINK: u32 = 2;

pub const STAGE_PARTS: u32 = 1;
pub const STAGE_GROUP: u32 = 2;
pub const STAGE_RING: u32 = 4;
pub const STAGE_NO_MEMORY: u32 = 8;
pub const STAGE_SAME_BYTES: u32 = 16;
pub const STAGE_GAPS: u32 = 32;
pub const STAGE_STEPS: u32 = 64;

pub const CHROMA_MONO: u32 = 0;
pub const CHROMA_420: u32 = 1;
pub const CHROMA_422: u32 = 2;
pub const CHROMA_444: u32 = 3;

#[repr(C)]
#[derive(Debug)]
pub struct ErrorText {
    pub struct_size: u32,
    pub reserved: u32,
    pub text: *mut u8,
    pub capacity: u64,
    pub length: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PpStage {
    pub name: [u8; 48],
    pub kind: u32,
    pub flags: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PpArg {
    pub key: *const u8,
    pub value: *const u8,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PpGeometry {
    pub struct_size: u32,
    pub width: u32,
    pub height: u32,
    pub chroma: u32,
    pub frames_per_frame: u32,
    pub bits: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct PpDescription {
    pub struct_size: u32,
    pub spaces: u32,
    pub chroma_formats: u32,
    pub context_frames: u32,
    pub digest: u64,
    pub name: [u8; 64],
    pub version: [u8; 32],
    pub stage_capacity: u32,
    pub stage_count: u32,
    pub stages: *mut PpStage,
    pub bits: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PpSessionConfig {
    pub struct_size: u32,
    pub space: u32,
    pub width: u32,
    pub height: u32,
    pub chroma: u32,
    pub max_frames: u32,
    pub threads: u32,
    pub noise_sigma: f32,
    pub device: u64,
    pub stream: u64,
    pub stage: u32,
    pub part: u32,
    pub parts: u32,
    pub laps: u32,
    pub member: u32,
    pub members: u32,
    pub arg_count: u32,
    pub bits: u32,
    pub args: *const PpArg,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PpPlan {
    pub struct_size: u32,
    pub height: u32,
    pub width: u32,
    pub num_denoise_steps: u32,
    pub expected_generator_calls: u32,
    pub do_kv_recompute: u32,
    pub init_cache: u32,
    pub reset_kv_cache: u32,
    pub reset_crossattn_cache: u32,
    pub kv_cache_attention_bias: f32,
    pub noise_scale: f32,
    pub skipped_frames: u32,
    pub current_start_frame: u64,
    pub base_seed: u64,
    pub context_skipped: [u32; MAX_CONTEXT_GAPS],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PpTensor {
    pub name: [u8; 48],
    pub dtype: u32,
    pub ndim: u32,
    pub dims: [u64; 8],
    pub offset: u64,
    pub bytes: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PpPayload {
    pub struct_size: u32,
    pub tensor_count: u32,
    pub tensors: *const PpTensor,
    pub data: *mut u8,
    pub bytes: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PpPlane {
    pub data: *mut u8,
    pub stride: u64,
    pub width: u32,
    pub height: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PpFrame {
    pub planes: [PpPlane; 3],
}

#[repr(C)]
#[derive(Debug)]
pub struct PpLayoutArgs {
    pub struct_size: u32,
    pub frames: u32,
    pub steps: u32,
    pub context_frames: u32,
    pub lap: u32,
    pub capacity: u32,
    pub input_count: u32,
    pub output_count: u32,
    pub inputs: *mut PpTensor,
    pub outputs: *mut PpTensor,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PpGroup {
    pub struct_size: u32,
    pub reserved: u32,
    pub context: *mut c_void,
    pub broadcast:
        Option<unsafe extern "C" fn(*mut c_void, *mut u8, u64, u32, *mut ErrorText) -> u32>,
    pub scatter: Option<PartsFn>,
    pub gather: Option<PartsFn>,
    pub all_reduce_sum:
        Option<unsafe extern "C" fn(*mut c_void, *mut u8, u64, u32, *mut ErrorText) -> u32>,
    pub send: Option<unsafe extern "C" fn(*mut c_void, *const u8, u64, u32, *mut ErrorText) -> u32>,
    pub receive:
        Option<unsafe extern "C" fn(*mut c_void, *mut u8, u64, u32, *mut ErrorText) -> u32>,
    pub barrier: Option<unsafe extern "C" fn(*mut c_void, *mut ErrorText) -> u32>,
}

/// `scatter` and `gather`.
pub type PartsFn =
    unsafe extern "C" fn(*mut c_void, *const u8, *const u64, *mut u8, u32, *mut ErrorText) -> u32;

#[repr(C)]
#[derive(Debug)]
pub struct PpRunArgs {
    pub struct_size: u32,
    pub lap: u32,
    pub frame_count: u32,
    pub observed_generator_calls: u32,
    pub plan: *const PpPlan,
    pub frames: *const PpFrame,
    pub input: *const PpPayload,
    pub output: *const PpPayload,
    pub group: *const PpGroup,
}

/// A session as the host sees it: the plugin's own, behind a pointer.
#[repr(C)]
#[derive(Debug)]
pub struct OpaqueSession {
    _private: [u8; 0],
}

pub type DescribeFn = unsafe extern "C" fn(*mut PpDescription, *mut ErrorText) -> u32;
pub type CreateFn = unsafe extern "C" fn(
    *const PpSessionConfig,
    *mut PpGeometry,
    *mut *mut OpaqueSession,
    *mut ErrorText,
) -> u32;
pub type DestroyFn = unsafe extern "C" fn(*mut OpaqueSession);
/// An entry that works on a session, with its arguments.
pub type CallFn<Args> = unsafe extern "C" fn(*mut OpaqueSession, *mut Args, *mut ErrorText) -> u32;
pub type SelfTestFn = unsafe extern "C" fn(*mut ErrorText) -> u32;
pub type EntryFn = unsafe extern "C" fn() -> *const Table;

/// The part of the table that may be read before anything about it is known.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TableHead {
    pub magic: u64,
    pub struct_size: u32,
    pub major: u16,
    pub minor: u16,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Table {
    pub head: TableHead,
    pub describe: Option<DescribeFn>,
    pub create: Option<CreateFn>,
    pub destroy: Option<DestroyFn>,
    pub layout: Option<CallFn<PpLayoutArgs>>,
    pub run: Option<CallFn<PpRunArgs>>,
    pub self_test: Option<SelfTestFn>,
}

/// The least that a table of major version 2 holds: everything up to and with `run`.
pub const TABLE_REQUIRED_BYTES: u32 = offset_of!(Table, self_test) as u32;

/// The bytes of a plan in major version 2 from its first minor version on.
pub const PLAN_REQUIRED_BYTES: u32 = offset_of!(PpPlan, context_skipped) as u32;
/// What a description of version 2.0 holds.
pub const DESCRIPTION_REQUIRED_BYTES: u32 = offset_of!(PpDescription, bits) as u32;

/// `sizeof`, as it goes into `struct_size`.
#[must_use]
pub const fn size<T>() -> u32 {
    size_of::<T>() as u32
}

/// `PP_DTYPE_*`: the wire counts its codes from 1, the ABI from 0.
#[must_use]
pub const fn dtype_code(dtype: DType) -> u32 {
    dtype.code() as u32 - 1
}

const _: () = {
    assert!(size_of::<ErrorText>() == 32);
    assert!(size_of::<PpDescription>() == 144);
    assert!(size_of::<PpStage>() == 56);
    assert!(size_of::<PpArg>() == 16);
    assert!(size_of::<PpGeometry>() == 24);
    assert!(size_of::<PpSessionConfig>() == 88);
    assert!(size_of::<PpPlan>() == 96);
    assert!(size_of::<PpTensor>() == 136);
    assert!(size_of::<PpPayload>() == 32);
    assert!(size_of::<PpPlane>() == 24);
    assert!(size_of::<PpFrame>() == 72);
    assert!(size_of::<PpLayoutArgs>() == 48);
    assert!(size_of::<PpGroup>() == 72);
    assert!(size_of::<PpRunArgs>() == 56);
    assert!(size_of::<TableHead>() == 16);
    assert!(size_of::<Table>() == 64);
    assert!(offset_of!(PpPlan, current_start_frame) == 48);
    assert!(offset_of!(PpTensor, dims) == 56);
    assert!(offset_of!(Table, describe) == 16);
    assert!(TABLE_REQUIRED_BYTES == 56);
    assert!(DESCRIPTION_REQUIRED_BYTES == 136);
};
