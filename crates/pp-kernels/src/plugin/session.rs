//! A session on host memory: safe calls on slices, with guard bytes around what the kernels write.

use pp_contract::VideoPlanParts;

use crate::config::{ChunkShape, Layout, SessionConfig};
use crate::error::KernelError;
use crate::frame::{FrameView, FrameViewMut};
use crate::group::Collectives;
use crate::guard;
use crate::payload::{Payload, PayloadMut};
use crate::stage::{FrameGeometry, StageInfo};

use super::raw::RawSession;

/// One session of a stage, on host memory.
///
/// Its state (the frames it remembers, its scratch memory) is its own; results depend on the sequence of calls alone.
/// # If dropped
/// The kernels destroy it; after a panic inside them too.
#[derive(Debug)]
pub struct StageSession {
    raw: RawSession,
}

impl StageSession {
    /// The session lies in host memory: the set has seen to that.
    pub(super) fn of(raw: RawSession) -> Self {
        StageSession { raw }
    }

    /// What the session was made for.
    #[must_use]
    pub fn config(&self) -> &SessionConfig {
        self.raw.config()
    }

    /// The stage that it runs.
    #[must_use]
    pub fn stage(&self) -> &StageInfo {
        self.raw.stage()
    }

    /// The frames of a source or a sink; a sink's may differ from those of the source.
    #[must_use]
    pub fn frames(&self) -> FrameGeometry {
        self.raw.frames()
    }

    /// The tensors of a chunk of this shape in this lap, each with its place in the payload.
    ///
    /// # Errors
    /// A shape that the session does not serve, or an answer that makes no sense.
    pub fn layout(&mut self, shape: ChunkShape, lap: u32) -> Result<Layout, KernelError> {
        self.raw.layout(shape, lap)
    }

    /// A source: frames to tensors, written straight into `output`.
    ///
    /// # Errors
    /// A stage of another kind, frames or plan of another size, a failure of the kernels, or a write past a tensor.
    pub fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        output: &mut PayloadMut<'_>,
    ) -> Result<(), KernelError> {
        // SAFETY: planes and payload are borrowed across the call, the payload exclusively.
        self.guarded(output, |raw, output| unsafe {
            raw.encode(frames, plan, output)
        })
    }

    /// A middle stage: `input` to `output`, in this lap. Gives the number of generator calls it made. A member of a group
    /// needs the group's collectives; only member 0 needs the memory of the tensors.
    ///
    /// # Errors
    /// A stage of another kind, a plan of another size, a group that is missing, a failure of the kernels, or a write past
    /// a tensor.
    pub fn run(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        group: Option<&mut dyn Collectives>,
    ) -> Result<u32, KernelError> {
        // SAFETY: both payloads are borrowed across the call, the output exclusively.
        self.guarded(output, |raw, output| unsafe {
            raw.run(plan, lap, input, output, group)
        })
    }

    /// A sink: tensors to frames, read straight from `input`.
    ///
    /// # Errors
    /// A stage of another kind, frames or plan of another size, or a failure of the kernels.
    pub fn decode(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), KernelError> {
        // SAFETY: the planes are borrowed exclusively across the call, and the payload is borrowed.
        unsafe { self.raw.decode(plan, input, frames) }
    }

    /// Arms the guards, runs `call`, checks the guards.
    fn guarded<T>(
        &mut self,
        payload: &mut PayloadMut<'_>,
        call: impl FnOnce(&mut RawSession, &mut PayloadMut<'_>) -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        if let Some((tensors, data, tail)) = payload.guarded() {
            guard::zero_gaps(tensors, data);
            guard::arm(tail);
        }
        let result = call(&mut self.raw, payload);
        // A payload on a device was refused, and a member that does not lead writes none.
        let Some((tensors, data, tail)) = payload.guarded() else {
            return result;
        };
        let changed = (
            guard::first_overrun(tensors, data),
            guard::first_changed(tail),
        );
        let overrun = match changed {
            (None, None) => return result,
            (Some(spec), _) => format!("tensor {}", spec.name()),
            (_, Some(index)) => format!("the payload (byte {index} behind it)"),
        };
        Err(self.raw.overrun(overrun))
    }
}
