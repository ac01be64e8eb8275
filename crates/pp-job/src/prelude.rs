//! The names that a program with stages on the host needs: `use pp_job::prelude::*`.

pub use std::convert::Infallible;

pub use pp_contract::{
    ChunkIndex, DType, Envelope, FaultKind, Manifest, Outcome, Plan, PlanError, Rank, TensorSpec,
};
pub use pp_runtime::core::Cut;
pub use pp_runtime::stage::{
    Built, Computed, Decoded, FrontStages, Offer, OnHost, PhaseBStages, Place, Progress,
    StageError, StageResult,
};
pub use pp_transport::backend::Edges;
pub use pp_transport::bell::Bell;
pub use pp_transport::host::{Host, RxLease, TxLease};

pub use crate::output::StagedFile;
pub use crate::{
    Config, Error, FRONT, Finished, FrontPart, Job, PHASE_B, PhaseBPart, Profile, Ranks,
};
