//! A plan without rules, for what no correct sender makes.

use pp_contract::{Envelope, Manifest, Plan, PlanError, VideoPlan, VideoPlanParts};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// More than a body holds.
const HUGE: usize = pp_contract::MAX_BODY_BYTES + 1;

/// The parts of a video plan, unchecked. Where nothing is wrong with them they travel as those do.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AnyParts {
    pub(super) parts: VideoPlanParts,
    pub(super) flaw: Option<Flaw>,
}

/// What is wrong with a plan as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    RefusesToBeSerialized,
    Huge,
}

impl Serialize for AnyParts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.flaw {
            None => self.parts.serialize(serializer),
            Some(Flaw::Huge) => serializer.serialize_bytes(&vec![0; HUGE]),
            Some(Flaw::RefusesToBeSerialized) => Err(serde::ser::Error::custom("it refuses")),
        }
    }
}

impl<'de> Deserialize<'de> for AnyParts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parts = VideoPlanParts::deserialize(deserializer)?;
        Ok(Self { parts, flaw: None })
    }
}

/// A video plan that is never refused.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AnyPlan(pub(super) AnyParts);

impl AnyPlan {
    /// The given plan, with a flaw.
    pub(super) fn new(plan: &VideoPlan, flaw: Option<Flaw>) -> Self {
        let parts = *plan.parts();
        Self(AnyParts { parts, flaw })
    }
}

impl Plan for AnyPlan {
    const NAME: &'static str = VideoPlan::NAME;
    const VERSION: u16 = VideoPlan::VERSION;
    type Parts = AnyParts;

    fn from_parts(parts: AnyParts) -> Result<Self, PlanError> {
        Ok(Self(parts))
    }

    fn parts(&self) -> &AnyParts {
        &self.0
    }

    fn expected_calls(&self) -> u32 {
        self.0.parts.expected_generator_calls
    }

    fn start_frame(&self) -> u64 {
        self.0.parts.current_start_frame
    }

    fn check_inputs(&self, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }

    fn check_outputs(&self, _: &Manifest, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
}

/// The given envelope, with a flaw in its plan.
pub(super) fn with_flaw(envelope: &Envelope<VideoPlan>, flaw: Option<Flaw>) -> Envelope<AnyPlan> {
    unchecked(
        AnyPlan::new(envelope.plan(), flaw),
        envelope.inputs().clone(),
        envelope.outputs().clone(),
    )
}

/// An envelope of a plan without rules.
pub(super) fn unchecked(plan: AnyPlan, inputs: Manifest, outputs: Manifest) -> Envelope<AnyPlan> {
    Envelope::new(plan, inputs, outputs).expect("a plan without rules refuses nothing")
}
