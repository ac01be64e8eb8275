//! Sessions on host memory or on a device, called alike: bytes go in, bytes come out, and the work is done.
//!
//! The wait for a device has no bound: a check takes as long as the kernels do.

use std::time::Duration;

use pp_contract::{Manifest, VideoPlanParts};
use pp_device::{CudaError, Event, Stream};

use super::group::Member;
use super::memory::Guarded;
use super::outcome::{Outcome, fail};
use crate::config::{ChunkShape, Layout};
use crate::group::Collectives;
use crate::payload::{Payload, PayloadMut};
use crate::plugin::RawSession;

/// Hears of each call before it is made.
pub(super) type Hears<'a> = Option<&'a (dyn Fn(&str) + Sync)>;

/// A session of a stage. Its context and its stream outlive it, and the context is current on each thread that calls it.
pub(super) struct CheckedSession<'a> {
    pub(super) raw: RawSession,
    /// Of a device.
    pub(super) stream: Option<Stream>,
    pub(super) hears: Hears<'a>,
    /// Fills memory that nothing has written.
    pub(super) fill: u8,
}

impl CheckedSession<'_> {
    /// Prepares this thread for calls, and gives a member the streams of the session.
    pub(super) fn join(&self, member: &mut Member) -> Result<(), CudaError> {
        if let Some(stream) = &self.stream {
            stream.device().bind()?;
            let results = self.raw.results().unwrap_or_else(|| stream.clone());
            member.streams = Some([stream.clone(), results]);
        }
        Ok(())
    }

    fn tell(&self, call: &str, plan: Option<&VideoPlanParts>) {
        if let Some(hears) = self.hears {
            let at = plan.map(|plan| format!(" at frame {}", plan.current_start_frame));
            let (stage, at) = (&self.raw.stage().name, at.unwrap_or_default());
            hears(&format!("{call} of {stage}{at}"));
        }
    }

    /// Waits for all that a call has enqueued.
    fn wait(&self) -> Result<(), CudaError> {
        let Some(stream) = &self.stream else {
            return Ok(());
        };
        if let Some(results) = self.raw.results() {
            let made = Event::new(stream.device())?;
            made.record(&results)?;
            stream.wait(&made)?;
        }
        stream.wait_until_idle(Duration::MAX)
    }

    pub(super) fn layout(&mut self, shape: ChunkShape, lap: u32) -> Outcome<Layout> {
        self.tell("layout", None);
        let layout = self.raw.layout(shape, lap)?;
        match self.raw.layout(shape, lap)? == layout {
            true => Ok(layout),
            false => fail("a second layout of the same chunk differs"),
        }
    }

    /// Calls a source: from frames to the bytes of these tensors.
    pub(super) fn encode(
        &mut self,
        frames: &[Vec<u8>],
        plan: &VideoPlanParts,
        outputs: &Manifest,
    ) -> Outcome<Vec<u8>> {
        self.tell("run", Some(plan));
        let (stream, geometry) = (self.stream.as_ref(), self.raw.frames());
        let mut to = Guarded::payload(stream, outputs, &[], self.fill)?;
        let mut samples = Guarded::frames(stream, &geometry, frames.len(), frames, self.fill)?;
        let views = samples.views(&geometry);
        // SAFETY: context and stream are alive. Payload and samples are freed when the stream has passed the call, or are
        // leaked, and nothing touches them before `wait` returns.
        unsafe { self.raw.encode(&views, plan, &mut to.taken(outputs)?) }?;
        self.wait()?;
        let name = &self.raw.stage().name;
        samples.check_unchanged(name)?;
        to.payload_of(name, outputs)
    }

    /// Calls a middle stage: from the bytes of the input to those of the output, and the number of generator calls. Of a
    /// group member 0 alone has bytes.
    pub(super) fn run(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        [inputs, outputs]: [&Manifest; 2],
        input: &[u8],
        group: Option<&mut dyn Collectives>,
    ) -> Outcome<(Vec<u8>, u32)> {
        self.tell("run", Some(plan));
        if self.raw.config().member > 0 {
            let (from, mut to) = (Payload::of_leader(inputs), PayloadMut::of_leader(outputs));
            // SAFETY: context and stream are alive; there is no payload.
            let calls = unsafe { self.raw.run(plan, lap, &from, &mut to, group) };
            self.wait()?;
            return Ok((Vec::new(), calls?));
        }
        let stream = self.stream.as_ref();
        let mut from = Guarded::payload(stream, inputs, input, self.fill)?;
        let mut to = Guarded::payload(stream, outputs, &[], self.fill)?;
        // A group has more streams than its caller knows: its input comes late.
        let late = match stream {
            Some(stream) if group.is_some() => from.arrive_late(stream)?,
            _ => None,
        };
        let (given, mut taken) = (from.given(inputs)?, to.taken(outputs)?);
        // SAFETY: as in `encode`, for both payloads, which are memory of their own.
        let calls = unsafe { self.raw.run(plan, lap, &given, &mut taken, group) };
        drop(late);
        self.wait()?;
        let (calls, name) = (calls?, &self.raw.stage().name);
        from.check_unchanged(name)?;
        Ok((to.payload_of(name, outputs)?, calls))
    }

    /// Calls a sink: from the bytes of these tensors to so many frames.
    pub(super) fn decode(
        &mut self,
        plan: &VideoPlanParts,
        inputs: &Manifest,
        input: &[u8],
        count: usize,
    ) -> Outcome<Vec<Vec<u8>>> {
        self.tell("run", Some(plan));
        let (stream, geometry) = (self.stream.as_ref(), self.raw.frames());
        let mut from = Guarded::payload(stream, inputs, input, self.fill)?;
        let mut samples = Guarded::frames(stream, &geometry, count, &[], self.fill)?;
        let mut views = samples.views_mut(&geometry);
        // SAFETY: as in `encode`.
        unsafe { self.raw.decode(plan, &from.given(inputs)?, &mut views) }?;
        self.wait()?;
        let name = &self.raw.stage().name;
        from.check_unchanged(name)?;
        samples.frames_of(name, &geometry)
    }
}

impl Drop for CheckedSession<'_> {
    fn drop(&mut self) {
        self.tell("destroy", None);
    }
}
