//! A plan without rules.

use std::fmt::Debug;

use pp_contract::{Manifest, Plan, PlanError, VideoPlanParts};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// What a [`Toy`] plan is made of.
pub trait ToyParts: Clone + Debug + PartialEq + Serialize + DeserializeOwned {
    /// The plan's name.
    const NAME: &'static str = "toy";

    /// See [`Plan::expected_calls`].
    fn expected_calls(&self) -> u32 {
        1
    }

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

    fn expected_calls(&self) -> u32 {
        self.expected_generator_calls
    }

    fn start_frame(&self) -> u64 {
        self.current_start_frame
    }
}

/// A plan that accepts any parts and any tensors.
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

    fn expected_calls(&self) -> u32 {
        self.0.expected_calls()
    }

    fn start_frame(&self) -> u64 {
        self.0.start_frame()
    }

    fn check_inputs(&self, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }

    fn check_outputs(&self, _: &Manifest, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
}
