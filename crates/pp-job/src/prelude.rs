//! The names that a program with stages on the host needs: `use pp_job::prelude::*`.

pub use std::convert::Infallible;

pub use pp_contract::{
    ChunkIndex, DType, DeviceName, FaultKind, Manifest, Message, Pipeline, Plan, PlanError, Rank,
    StageSpec, TensorSpec, WorldSize,
};
pub use pp_runtime::core::{Cut, Late};
pub use pp_runtime::stage::{
    Built, Chunk, Done, GroupStage, Offer, OnHost, Place, Progress, Sink, Source, Stage,
    StageError, StageResult, Taken, first_bytes,
};
pub use pp_transport::bell::Bell;
pub use pp_transport::host::{Host, HostGroup, RxLease, TxLease};
pub use pp_transport::launch::LocalJob;

pub use crate::output::StagedFile;
pub use crate::{Config, Elsewhere, Error, Finished, Job, Opened, Profile, Program};
