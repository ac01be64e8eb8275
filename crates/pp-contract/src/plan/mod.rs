//! The plan: what the source asks of the stages for one chunk.
//!
//! *Hazard.* When each side guesses from "which tensors happen to be there", one of them skips a
//! step that the other waits for.
//! *Guarantee.* The plan decides. It is checked when it is made, with the tensors when a message
//! is made, and again, by the same functions, when the message arrives.

pub(crate) mod fields;
pub(crate) mod video;

use core::fmt::{Debug, Write as _};
use core::ops::Range;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::dtype::DType;
use crate::manifest::Manifest;
use crate::pipeline::{Pipeline, StageSpec};

/// A plan: plain data that is always valid, and the rules for the tensors that go with it.
///
/// Implement it for a type whose only way in is [`Plan::from_parts`]. What travels is
/// [`Plan::Parts`]; let those be numbers, flags, [`Text`](crate::Text) and
/// [`List`](crate::List), so that a length from a peer is bounded.
pub trait Plan: Clone + Debug + PartialEq + Sized {
    /// Name of the kind of plan; both sides must agree on it.
    const NAME: &'static str;
    /// Version of the parts and of the rules; both sides must agree on it.
    const VERSION: u16;
    /// The plain data as it travels, not checked yet.
    type Parts: Serialize + DeserializeOwned;

    /// The plan made of these parts.
    ///
    /// # Errors
    /// [`PlanError`] when they contradict each other or a bound.
    fn from_parts(parts: Self::Parts) -> Result<Self, PlanError>;

    /// The parts.
    fn parts(&self) -> &Self::Parts;

    /// How many calls `stage` makes for the chunk in these of its `of` laps; outside of a ring there is one. Its report
    /// must say the same number.
    fn calls(&self, _stage: &StageSpec, laps: Range<u16>, _of: u16) -> u32 {
        laps.len() as u32
    }

    /// How often the chunk goes through a ring that is walked once for each step; 0 is as 1.
    fn steps(&self) -> u16 {
        1
    }

    /// The first frame of the chunk; each report must say the same number.
    fn start_frame(&self) -> u64;

    /// Checks the tensors that `stage` made, in its last lap or in another one; outside of a ring the one lap is the last.
    ///
    /// # Errors
    /// [`PlanError`] when one is missing, of the wrong type or shape, or not called for.
    fn check(
        &self,
        stage: &StageSpec,
        is_last_lap: bool,
        tensors: &Manifest,
    ) -> Result<(), PlanError>;
}

/// Why a plan, or the tensors with it, is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A field breaks a rule.
    #[error("{field} is {value}: {rule}")]
    Field {
        /// The field.
        field: &'static str,
        /// What it holds.
        value: String,
        /// What it should hold.
        rule: String,
    },
    /// The tensors are not those that the plan calls for.
    #[error("the plan calls for tensors [{wanted}] in this order, the manifest has [{got}]")]
    Tensors {
        /// Names and types that the plan calls for.
        wanted: String,
        /// Names and types in the manifest.
        got: String,
    },
    /// A tensor has the wrong shape.
    #[error("tensor {name} has shape {got}, the plan calls for {wanted}")]
    Shape {
        /// The tensor.
        name: String,
        /// The shape that the plan calls for.
        wanted: String,
        /// The shape in the manifest.
        got: String,
    },
}

impl PlanError {
    /// A field that breaks `rule`.
    pub fn field(field: &'static str, value: impl ToString, rule: impl Into<String>) -> Self {
        let (value, rule) = (value.to_string(), rule.into());
        Self::Field { field, value, rule }
    }
}

/// What a plan says of a pipeline.
impl Pipeline {
    /// How often a chunk with this plan goes through stage `at`; at least once.
    #[must_use]
    pub fn laps_of<P: Plan>(&self, at: usize, plan: &P) -> u16 {
        self.laps(at, plan.steps())
    }
}

/// What plans ask of a manifest.
impl Manifest {
    /// Checks that the tensors are exactly `wanted`: names and types, in this order.
    ///
    /// # Errors
    /// [`PlanError::Tensors`].
    pub fn expect_tensors(&self, wanted: &[(&str, DType)]) -> Result<(), PlanError> {
        self.expect_each(wanted.iter().copied())
    }

    fn expect_each<'a>(
        &'a self,
        wanted: impl Iterator<Item = (&'a str, DType)> + Clone,
    ) -> Result<(), PlanError> {
        let got = || self.iter().map(|(_, spec)| (spec.name(), spec.dtype()));
        if got().eq(wanted.clone()) {
            return Ok(());
        }
        let (wanted, got) = (list(wanted), list(got()));
        Err(PlanError::Tensors { wanted, got })
    }

    /// Checks that the tensor of this name is there, with these dimensions.
    ///
    /// # Errors
    /// [`PlanError::Shape`].
    pub fn expect_shape(&self, name: &str, dims: &[u64]) -> Result<(), PlanError> {
        let got = self.get(name).map(|(_, spec)| *spec.shape());
        if got.is_some_and(|shape| shape.dims() == dims) {
            return Ok(());
        }
        Err(PlanError::Shape {
            name: name.to_owned(),
            wanted: format!("{dims:?}"),
            got: got.map_or("none: it is missing".to_owned(), |shape| shape.to_string()),
        })
    }
}

fn list<'a>(tensors: impl Iterator<Item = (&'a str, DType)>) -> String {
    let mut text = String::new();
    for (name, dtype) in tensors {
        let comma = if text.is_empty() { "" } else { ", " };
        // Writing into text cannot fail.
        let _ = write!(text, "{comma}{name} {dtype}");
    }
    text
}
