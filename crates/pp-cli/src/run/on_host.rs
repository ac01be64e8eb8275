//! Kernels on host memory: the leases' bytes are read and written in place.

use std::convert::Infallible;

use pp_contract::{FaultKind, Manifest, VideoPlanParts};
use pp_kernels::{ChunkShape, KernelError, KernelSession, Layout, Payload, PayloadMut};
use pp_runtime::stage::{Progress, StageError};
use pp_transport::host::{RxLease, TxLease};

use crate::video::buffer::Buffer;

use super::codec::{Codec, Frames, Generated, Generator, Geometry, failed, internal};
use super::noise;
use pp_runtime::drift::HostDigester;

/// A session of kernels on this machine's processors.
pub(super) struct HostKernels {
    session: KernelSession,
    geometry: Geometry,
    digester: HostDigester,
    estimated_noise: Option<Vec<f32>>,
}

impl HostKernels {
    pub(super) fn new(session: KernelSession, geometry: Geometry) -> Self {
        Self {
            session,
            geometry,
            digester: HostDigester,
            estimated_noise: None,
        }
    }
}

impl Codec for HostKernels {
    type Tx = TxLease;
    type Rx = RxLease;
    type Digester = HostDigester;
    type Encoded = ();
    type Decoding = Infallible;

    fn digester(&mut self) -> &mut HostDigester {
        &mut self.digester
    }

    fn layout(&mut self, shape: ChunkShape) -> Result<Layout, KernelError> {
        self.session.layout(shape)
    }

    const READS_LATER: bool = false;

    fn encode(
        &mut self,
        frames: &Buffer,
        bytes: usize,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        slot: &mut TxLease,
    ) -> Result<(), StageError> {
        let views = self.geometry.views(&frames[..bytes]);
        let mut payload = PayloadMut::new(tensors, slot.bytes_mut()).map_err(internal("encode"))?;
        self.session
            .encode(&views, plan, &mut payload)
            .map_err(failed(FaultKind::Plugin, "encode"))?;
        let place = noise::place(tensors, self.geometry.chroma);
        if let Some(place) = place.filter(|_| noise::is_estimated(plan)) {
            self.estimated_noise = noise::sigmas(&slot.bytes_mut()[place]);
        }
        Ok(())
    }

    fn estimated_noise(&mut self) -> Option<Vec<f32>> {
        self.estimated_noise.take()
    }

    fn decode(
        &mut self,
        (): (),
        mut frames: Buffer,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        payload: Option<RxLease>,
    ) -> Result<Progress<Frames, Infallible>, StageError> {
        let mut views = self.geometry.views_mut(&mut frames);
        let bytes = payload.as_ref().map_or(&[][..], RxLease::bytes);
        let input = Payload::new(tensors, bytes).map_err(internal("decode"))?;
        self.session
            .decode(plan, &input, &mut views)
            .map_err(failed(FaultKind::Plugin, "decode"))?;
        Ok(Progress::Done(Frames {
            bytes: frames,
            worked: None,
        }))
    }
}

impl Generator for HostKernels {
    type Tx = TxLease;
    type Rx = RxLease;
    type Digester = HostDigester;
    type Computing = Infallible;

    fn digester(&mut self) -> &mut HostDigester {
        &mut self.digester
    }

    fn generate(
        &mut self,
        plan: &VideoPlanParts,
        inputs: &Manifest,
        input: Option<&RxLease>,
        outputs: &Manifest,
        output: &mut TxLease,
    ) -> Result<Progress<Generated, Infallible>, StageError> {
        let refuse = failed(FaultKind::PeerMisbehaved, "phase_b");
        let bytes = input.map_or(&[][..], RxLease::bytes);
        let input = Payload::new(inputs, bytes).map_err(&refuse)?;
        let mut output = PayloadMut::new(outputs, output.bytes_mut()).map_err(&refuse)?;
        let calls = self
            .session
            .phase_b(plan, &input, &mut output)
            .map_err(failed(FaultKind::Plugin, "phase_b"))?;
        Ok(Progress::Done(Generated {
            calls,
            worked: None,
        }))
    }
}
