//! The message: a chunk on its way from stage to stage, and from the sink back to the source.

use serde::{Deserialize, Serialize};

use crate::bounded::List;
use crate::codec::{self, BodyError};
use crate::ids::Rank;
use crate::manifest::{Manifest, WireManifest};
use crate::pipeline::{Pipeline, StageSpec};
use crate::plan::{Plan, PlanError};
use crate::trail::{StageReport, Trail};

/// Most bytes of a note.
pub const MAX_NOTE_BYTES: usize = 4096;

/// A chunk on its way: what is to be done, the tensors that a stage made, and what the stages so far say.
///
/// Plan and tensors agree: the only ways in are [`Message::new`], [`Message::hand_on`] and decoding, which checks the
/// same and the trail. The tensors may be sealed ([`Manifest::sealed`]): then the payload carries their digests.
///
/// A message of known tensors is made and handed on without an allocation, but for the place of a new report in the
/// trail.
#[derive(Debug, Clone, PartialEq)]
pub struct Message<P: Plan> {
    plan: P,
    tensors: Manifest,
    trail: Trail,
    note: List<u8, MAX_NOTE_BYTES>,
    is_stale: bool,
}

impl<P: Plan> Message<P> {
    /// What the source sends: the plan, and the tensors that it made.
    ///
    /// # Errors
    /// What [`Plan::check`] says.
    pub fn new(plan: P, source: &StageSpec, tensors: Manifest) -> Result<Self, PlanError> {
        check(&plan, source, true, &tensors)?;
        Ok(Self {
            plan,
            tensors,
            trail: Trail::default(),
            note: List::default(),
            is_stale: false,
        })
    }

    /// Adds what the source tells the sink of this chunk; the stages between hand it on as it is.
    ///
    /// # Errors
    /// [`PlanError::Field`]: it is longer than [`MAX_NOTE_BYTES`].
    pub fn with_note(mut self, note: Vec<u8>) -> Result<Self, PlanError> {
        let len = note.len();
        let rule = || PlanError::field("note", len, format!("at most {MAX_NOTE_BYTES} bytes"));
        self.note = List::new(note).map_err(|_| rule())?;
        Ok(self)
    }

    /// What stage `at` hands on in this lap: the tensors that it made, and its report; of a group that of the leader, with
    /// those of the others behind it ([`Message::joined`]). A stale message stays as it is.
    ///
    /// # Errors
    /// What [`Plan::check`] says of the tensors.
    ///
    /// # Panics
    /// If `at` is the source, or a stage before it has not reported. A message that was decoded for the stage before
    /// `at` has these reports.
    pub fn hand_on(
        mut self,
        pipeline: &Pipeline,
        (at, lap): (usize, u16),
        tensors: Manifest,
        report: &StageReport,
    ) -> Result<Self, PlanError> {
        if self.is_stale {
            return Ok(self);
        }
        let is_last_lap = lap == pipeline.laps_of(at, &self.plan) - 1;
        check(&self.plan, &pipeline.stages()[at], is_last_lap, &tensors)?;
        self.tensors = tensors;
        self.trail.add(pipeline, at, report);
        Ok(self)
    }

    /// With the report of the next member of the group that works on it, in the order of the pipeline's text. A stale message
    /// stays as it is.
    ///
    /// # Panics
    /// If there are more reports than any pipeline has.
    #[must_use]
    pub fn joined(mut self, member: &StageReport) -> Self {
        if !self.is_stale {
            self.trail.join(member);
        }
        self
    }

    /// What the sink sends to the source: no tensors are left, and the note is what it tells the source. A stale message
    /// stays as it is.
    ///
    /// # Errors
    /// [`PlanError::Field`]: the note is longer than [`MAX_NOTE_BYTES`].
    ///
    /// # Panics
    /// If a stage before the sink has not reported, as in [`Message::hand_on`].
    pub fn accepted(
        mut self,
        pipeline: &Pipeline,
        report: &StageReport,
        note: Vec<u8>,
    ) -> Result<Self, PlanError> {
        if self.is_stale {
            return Ok(self);
        }
        self.tensors = Manifest::empty();
        self.trail
            .add(pipeline, pipeline.stages().len() - 1, report);
        self.with_note(note)
    }

    /// What a member of the group that runs stage `at` tells its leader: its report, without tensors and note.
    ///
    /// # Panics
    /// As [`Message::hand_on`].
    #[must_use]
    pub fn reported(mut self, pipeline: &Pipeline, at: usize, report: &StageReport) -> Self {
        self.tensors = Manifest::empty();
        self.trail.add(pipeline, at, report);
        self.note = List::default();
        self
    }

    /// The message of a chunk that a hard cut overtook: it goes on to the sink without tensors and reports, and no stage
    /// works on it. It goes all laps of a ring, so that no chunk passes another.
    #[must_use]
    pub fn overtaken(mut self) -> Self {
        self.tensors = Manifest::empty();
        self.trail = Trail::default();
        self.is_stale = true;
        self
    }

    /// What is to be done.
    #[must_use]
    pub const fn plan(&self) -> &P {
        &self.plan
    }

    /// The tensors of the payload that goes with it.
    #[must_use]
    pub const fn tensors(&self) -> &Manifest {
        &self.tensors
    }

    /// What the stages so far say.
    #[must_use]
    pub const fn trail(&self) -> &Trail {
        &self.trail
    }

    /// What the source tells the sink.
    #[must_use]
    pub fn note(&self) -> &[u8] {
        &self.note
    }

    /// Says whether a hard cut overtook the chunk.
    #[must_use]
    pub const fn is_stale(&self) -> bool {
        self.is_stale
    }

    pub(crate) fn to_body(&self) -> impl Serialize {
        (
            self.plan.parts(),
            &self.tensors,
            &self.trail,
            &*self.note,
            self.is_stale,
        )
    }

    /// Decodes the message that stage `maker` sent for this lap. The acceptance of the sink and the report of a member have
    /// no tensors.
    pub(crate) fn from_body(
        body: &[u8],
        pipeline: &Pipeline,
        (maker, lap): (usize, u16),
        sender: Rank,
        has_tensors: bool,
    ) -> Result<Self, BodyError> {
        #[derive(Deserialize)]
        struct Body<T>(T, WireManifest, Trail, List<u8, MAX_NOTE_BYTES>, bool);

        let Body(parts, tensors, trail, note, is_stale) =
            codec::decode::<Body<P::Parts>>("a message", body)?;
        let message = Self {
            plan: P::from_parts(parts)?,
            tensors: tensors.try_into()?,
            trail,
            note,
            is_stale,
        };
        if is_stale || !has_tensors {
            message.tensors.expect_tensors(&[])?;
        } else {
            let is_last_lap = match pipeline.ring_at(maker) {
                Some(ring) if maker < ring.last => {
                    lap == pipeline.laps_of(maker, &message.plan) - 1
                }
                // Only the last lap leads out of the ring.
                Some(_) => lap == 0,
                None => true,
            };
            let spec = &pipeline.stages()[maker];
            check(&message.plan, spec, is_last_lap, &message.tensors)?;
        }
        let (trail, plan) = (&message.trail, &message.plan);
        trail.check(plan, is_stale, pipeline, (maker, lap), sender)?;
        Ok(message)
    }
}

/// A plan knows nothing of seals.
fn check<P: Plan>(
    plan: &P,
    maker: &StageSpec,
    is_last_lap: bool,
    tensors: &Manifest,
) -> Result<(), PlanError> {
    plan.check(maker, is_last_lap, &tensors.unsealed())
}
