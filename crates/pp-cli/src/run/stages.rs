//! The stages of `pp run` one by one, for a program of one's own.

use pp_contract::{StageSpec, VideoPlan};
use pp_device::Device;
use pp_job::{Error, Opened};
use pp_runtime::stage::{GroupStage, Sink, Stage};
use pp_transport::bell::Bell;
use pp_transport::gpu::{DeviceRx, DeviceTx};
use pp_transport::host::{HostGroup, RxLease, TxLease};
use pp_transport::nccl::Communicator;

use super::on_gpu::OnGpu;
use super::on_host::OnHost;
use super::{ClipSource, Shape, VideoJob};

impl VideoJob<'_> {
    /// The source, with kernels on host memory.
    ///
    /// # Errors
    /// The input or the kernels cannot be opened.
    pub fn source_on_host(
        &self,
        bell: Bell,
    ) -> Result<Opened<impl ClipSource<TxLease>, Shape>, Error> {
        self.source(&OnHost, bell)
    }

    /// The source, with kernels on a GPU.
    ///
    /// # Errors
    /// As [`VideoJob::source_on_host`].
    pub fn source_on_gpu(
        &self,
        device: &Device,
        bell: Bell,
    ) -> Result<Opened<impl ClipSource<DeviceTx>, Shape>, Error> {
        let device = device.clone();
        self.source(&OnGpu { device }, bell)
    }

    /// A stage between source and sink, or a part of one, with kernels on host memory; of a group this member.
    ///
    /// # Errors
    /// The kernels cannot be opened.
    pub fn stage_on_host(
        &self,
        stage_and_member: (&StageSpec, usize),
        shape: &Shape,
    ) -> Result<
        impl Stage<TxLease, RxLease, Plan = VideoPlan>
        + GroupStage<TxLease, RxLease, HostGroup, Plan = VideoPlan>
        + use<>,
        Error,
    > {
        self.stage(&OnHost, stage_and_member, shape)
    }

    /// The same, with kernels on a GPU.
    ///
    /// # Errors
    /// As [`VideoJob::stage_on_host`].
    pub fn stage_on_gpu(
        &self,
        device: &Device,
        stage_and_member: (&StageSpec, usize),
        shape: &Shape,
    ) -> Result<
        impl Stage<DeviceTx, DeviceRx, Plan = VideoPlan>
        + GroupStage<DeviceTx, DeviceRx, Communicator, Plan = VideoPlan>
        + use<>,
        Error,
    > {
        let device = device.clone();
        self.stage(&OnGpu { device }, stage_and_member, shape)
    }

    /// The sink, with kernels on host memory.
    ///
    /// # Errors
    /// The output or the kernels cannot be opened.
    pub fn sink_on_host(
        &self,
        shape: &Shape,
        bell: Bell,
    ) -> Result<impl Sink<RxLease, Plan = VideoPlan> + use<>, Error> {
        self.sink(&OnHost, shape, bell)
    }

    /// The sink, with kernels on a GPU.
    ///
    /// # Errors
    /// As [`VideoJob::sink_on_host`].
    pub fn sink_on_gpu(
        &self,
        device: &Device,
        shape: &Shape,
        bell: Bell,
    ) -> Result<impl Sink<DeviceRx, Plan = VideoPlan> + use<>, Error> {
        let device = device.clone();
        self.sink(&OnGpu { device }, shape, bell)
    }
}
