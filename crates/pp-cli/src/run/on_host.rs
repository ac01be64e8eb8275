//! Kernels on host memory: the leases' bytes are read and written in place.

use std::convert::Infallible;

use pp_contract::{FaultKind, Manifest, VideoPlanParts};
use pp_kernels::{
    ChunkShape, FrameGeometry, KernelError, Layout, Payload, PayloadMut, StageSession,
};
use pp_runtime::drift::HostDigester;
use pp_runtime::stage::{Progress, StageResult};
use pp_transport::host::{HostGroup, RxLease, TxLease};
use pp_video::buffer::Buffer;
use pp_video::estimates;

use super::group::OfHost;
use super::kernels::{
    Encoded, Frames, Generated, Kernels, Memory, Opening, failed, internal, views, views_mut,
};

/// The memory of this machine.
pub struct OnHost;

/// A stage of kernels on this machine's processors.
pub struct HostStage {
    /// What faults call it.
    name: &'static str,
    session: StageSession,
    digester: HostDigester,
}

impl Memory for OnHost {
    type Kernels = HostStage;

    fn open(&self, stage: &Opening<'_>) -> StageResult<HostStage> {
        let opened = stage
            .kernels
            .open_stage(stage.stage, &stage.config, stage.args);
        let session = opened.map_err(failed(FaultKind::Plugin, "open kernels"))?;
        Ok(HostStage {
            name: stage.stage,
            session,
            digester: HostDigester,
        })
    }
}

impl Kernels for HostStage {
    type Tx = TxLease;
    type Rx = RxLease;
    type Group = HostGroup;
    type Digester = HostDigester;
    type Encoding = Infallible;
    type Computing = Infallible;
    type Decoding = Infallible;

    fn digester(&mut self) -> &mut HostDigester {
        &mut self.digester
    }

    fn layout(&mut self, shape: ChunkShape, lap: u16) -> Result<Layout, KernelError> {
        self.session.layout(shape, lap.into())
    }

    fn frames(&self) -> FrameGeometry {
        self.session.frames()
    }

    fn encode(
        &mut self,
        frames: &Buffer,
        bytes: usize,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        slot: &mut TxLease,
    ) -> StageResult<Progress<Encoded, Infallible>> {
        let views = views(self.frames(), &frames[..bytes]);
        let mut payload =
            PayloadMut::new(tensors, slot.bytes_mut()).map_err(internal(self.name))?;
        self.session
            .encode(&views, plan, &mut payload)
            .map_err(failed(FaultKind::Plugin, self.name))?;
        let place = estimates::place(plan, tensors, self.frames().chroma);
        Ok(Progress::Done(Encoded {
            worked: None,
            noise: place.and_then(|place| estimates::sigmas(&slot.bytes_mut()[place])),
        }))
    }

    fn decode(
        &mut self,
        mut frames: Buffer,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        payload: Option<&RxLease>,
    ) -> StageResult<Progress<Frames, Infallible>> {
        let mut views = views_mut(self.frames(), &mut frames);
        let bytes = payload.map_or(&[][..], RxLease::bytes);
        let input = Payload::new(tensors, bytes).map_err(internal(self.name))?;
        self.session
            .decode(plan, &input, &mut views)
            .map_err(failed(FaultKind::Plugin, self.name))?;
        Ok(Progress::Done(Frames {
            bytes: frames,
            worked: None,
        }))
    }

    fn generate(
        &mut self,
        (plan, lap): (&VideoPlanParts, u16),
        (inputs, input): (&Manifest, Option<&RxLease>),
        (outputs, output): (&Manifest, Option<&mut TxLease>),
        group: Option<&mut HostGroup>,
    ) -> StageResult<Progress<Generated, Infallible>> {
        let refuse = failed(FaultKind::PeerMisbehaved, self.name);
        let (input, mut output) = match output {
            Some(output) => {
                let bytes = input.map_or(&[][..], RxLease::bytes);
                let input = Payload::new(inputs, bytes).map_err(&refuse)?;
                let output = PayloadMut::new(outputs, output.bytes_mut()).map_err(&refuse)?;
                (input, output)
            }
            None => (Payload::of_leader(inputs), PayloadMut::of_leader(outputs)),
        };
        let session = &mut self.session;
        let blame = (FaultKind::Plugin, self.name);
        let calls = match group {
            None => {
                let calls = session.run(plan, lap.into(), &input, &mut output, None);
                calls.map_err(failed(blame.0, blame.1))?
            }
            Some(group) => {
                let mut lent = OfHost::new(group, ());
                let calls = session.run(plan, lap.into(), &input, &mut output, Some(&mut lent));
                lent.judge(calls, blame)?
            }
        };
        Ok(Progress::Done(Generated {
            calls,
            worked: None,
        }))
    }
}
