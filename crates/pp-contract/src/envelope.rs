//! The envelope: the plan of one chunk, and the manifests of what goes there and comes back.

use serde::{Deserialize, Serialize};

use crate::codec::{self, BodyError};
use crate::manifest::{Manifest, WireManifest};
use crate::plan::{Plan, PlanError};

/// What the front asks for: a plan, the tensors that come with it, the tensors it wants back.
///
/// The receiver sizes the slot of the result from `outputs`. Plan and tensors agree: the only ways
/// in are [`Envelope::new`] and decoding, which goes through it. Either manifest may be sealed
/// ([`Manifest::sealed`]): then that payload carries the digests of its tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct Envelope<P: Plan> {
    plan: P,
    inputs: Manifest,
    outputs: Manifest,
}

impl<P: Plan> Envelope<P> {
    /// The envelope of this plan and these tensors.
    ///
    /// # Errors
    /// What [`Plan::check_inputs`] and [`Plan::check_outputs`] say.
    pub fn new(plan: P, inputs: Manifest, outputs: Manifest) -> Result<Self, PlanError> {
        // A plan knows nothing of seals.
        let plain = inputs.unsealed();
        plan.check_inputs(&plain)?;
        plan.check_outputs(&plain, &outputs.unsealed())?;
        Ok(Self {
            plan,
            inputs,
            outputs,
        })
    }

    /// What is to be done.
    #[must_use]
    pub const fn plan(&self) -> &P {
        &self.plan
    }

    /// The tensors of the payload that goes with it.
    #[must_use]
    pub const fn inputs(&self) -> &Manifest {
        &self.inputs
    }

    /// The tensors that the front wants back.
    #[must_use]
    pub const fn outputs(&self) -> &Manifest {
        &self.outputs
    }

    pub(crate) fn to_body(&self) -> impl Serialize {
        (self.plan.parts(), &self.inputs, &self.outputs)
    }

    pub(crate) fn from_body(body: &[u8]) -> Result<Self, BodyError> {
        #[derive(Deserialize)]
        struct Body<T>(T, WireManifest, WireManifest);

        let Body(parts, inputs, outputs) = codec::decode::<Body<P::Parts>>("an envelope", body)?;
        let plan = P::from_parts(parts)?;
        Ok(Self::new(plan, inputs.try_into()?, outputs.try_into()?)?)
    }
}
