//! Kernels of the pipeline: the C ABI, the loader and check of plugins, and the built-in kernels for CPUs and for CUDA.
//!
//! A set of kernels is a list of stages: a *source* (frames to tensors), *middle* stages (tensors to tensors) and a
//! *sink* (tensors to frames); the built-in ones are `encode`, `phase_b` and `decode`. They reach the runtime through
//! one table of C functions (`include/pp_kernel.h`), whether they are built in or come from a file, so a user's model
//! is swapped in without rebuilding anything: `--kernels my_model.so`.
//!
//! Guarantees: a file that is not a plugin, or one of another version, is refused with the reason and before anything
//! in its table is called; a panic in a Rust plugin is an error, not an abort; a write past a tensor is found
//! ([`guard`]); nothing is allocated on one side and freed on the other; a loaded library is never unloaded.
//! Not guaranteed: safety from a hostile file. Loading a library runs its code.
//!
//! - To call kernels: [`KernelSet`] and [`StageSession`].
//! - To write kernels in Rust: [`Kernels`], [`Session`] and [`export_kernels!`].
//! - To test a plugin: [`check::CHECKS`].
//! - What the default kernels compute: [`denoise`], and plainly in [`mod@denoise::reference`].

pub mod abi;
mod border;
pub mod check;
mod config;
mod convert;
mod cuda;
pub mod denoise;
mod error;
pub mod export;
mod frame;
mod group;
pub mod guard;
pub mod measure;
mod payload;
mod plugin;
mod stage;
pub mod synthetic;

pub use config::{Bits, Chroma, ChunkShape, Layout, SessionConfig, Space};
// What the traits speak of.
pub use cuda::{DeviceDigests, DeviceTensor};
pub use denoise::cuda::{check_device, runs_on};
pub use error::{Failure, KernelError, LoadError, Status};
pub use export::{Kernels, Session};
pub use frame::{Frame, FrameView, FrameViewMut, Plane, PlaneView, PlaneViewMut};
pub use group::Collectives;
pub use payload::{HostMut, Payload, PayloadMut, TensorsIn};
pub use plugin::{KernelSet, RawSession, StageSession};
pub use pp_contract::{DType, Manifest, TensorSpec, VideoPlanParts, pass_range};
pub use stage::{Description, FrameGeometry, StageInfo, StageKind};
