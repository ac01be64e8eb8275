//! A plan without rules.

use std::fmt::Debug;

use pp_contract::{Manifest, Plan, PlanError, StageSpec, VideoPlanParts};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// What a [`Toy`] plan is made of.
pub trait ToyParts: Clone + Debug + PartialEq + Serialize + DeserializeOwned {
    /// The plan's name.
    const NAME: &'static str = "toy";

    /// See [`Plan::start_frame`].
    fn start_frame(&self) -> u64 {
        0
    }
}

/// The number of a message.
impl ToyParts for u64 {
    fn start_frame(&self) -> u64 {
        *self
    }
}

/// What a peer sends that does not keep the rules of the video plan.
impl ToyParts for VideoPlanParts {
    const NAME: &'static str = "video";

    fn start_frame(&self) -> u64 {
        self.current_start_frame
    }
}

/// A plan that accepts any parts and any tensors, with one call of each stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Toy<P = u64>(pub P);

impl<P: ToyParts> Plan for Toy<P> {
    const NAME: &'static str = P::NAME;
    const VERSION: u16 = 1;
    type Parts = P;

    fn from_parts(parts: P) -> Result<Self, PlanError> {
        Ok(Self(parts))
    }

    fn parts(&self) -> &P {
        &self.0
    }

    fn start_frame(&self) -> u64 {
        self.0.start_frame()
    }

    fn check(&self, _: &StageSpec, _: bool, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
}
