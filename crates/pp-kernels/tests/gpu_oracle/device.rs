//! A GPU for the tests: a context, a stream, and buffers that are copied and waited for.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, result};
use pp_contract::pass_range;
use pp_kernels::{
    Chroma, ChunkShape, FrameGeometry, FrameView, FrameViewMut, KernelSet, Layout, Payload,
    PayloadMut, PlaneView, PlaneViewMut, RawSession, SessionConfig, StageKind, StageSession,
    VideoPlanParts,
};

pub(crate) struct Gpu {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
}

impl Gpu {
    /// Fails, with the reason, where there is no device: the caller asked for a real one.
    pub(crate) fn open() -> Gpu {
        // SAFETY: looking for the driver loads it.
        let is_there = unsafe { cudarc::driver::sys::is_culib_present() };
        assert!(is_there, "libcuda is not found: install the NVIDIA driver");
        let context = CudaContext::new(0).expect("device 0 can be opened");
        // SAFETY: this file waits for the stream after everything it does.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().expect("a stream can be made");
        Gpu { context, stream }
    }

    pub(crate) fn name(&self) -> String {
        let (major, minor) = self.context.compute_capability().expect("a capability");
        format!(
            "{} (compute capability {major}.{minor})",
            self.context.name().expect("a name")
        )
    }

    /// The raw context and stream.
    pub(crate) fn handles(&self) -> (u64, u64) {
        (self.context.cu_ctx() as u64, self.stream.cu_stream() as u64)
    }

    pub(crate) fn config(
        &self,
        width: u32,
        height: u32,
        chroma: Chroma,
        frames: u32,
    ) -> SessionConfig {
        let (context, stream) = self.handles();
        SessionConfig::cuda(width, height, chroma, frames, context, stream)
    }
}

/// The built-in CUDA kernels, or the plugin that `PP_TEST_KERNELS` names, which must compute the same.
pub(crate) fn kernels() -> KernelSet {
    match std::env::var_os("PP_TEST_KERNELS") {
        Some(file) => KernelSet::load(file.as_ref()).expect("PP_TEST_KERNELS names a plugin"),
        None => KernelSet::for_device(),
    }
}

/// The kernels of one or the other.
#[derive(Clone, Copy)]
pub(crate) enum Kernels<'a> {
    Cpu,
    Gpu(&'a Gpu),
}

impl<'a> Kernels<'a> {
    pub(crate) fn config(
        self,
        width: u32,
        height: u32,
        chroma: Chroma,
        frames: u32,
    ) -> SessionConfig {
        match self {
            Kernels::Cpu => SessionConfig::host(width, height, chroma, frames),
            Kernels::Gpu(gpu) => gpu.config(width, height, chroma, frames),
        }
    }

    pub(crate) fn open(self, config: SessionConfig) -> Session<'a> {
        match self {
            Kernels::Cpu => Session::cpu(config),
            Kernels::Gpu(gpu) => Session::gpu(gpu, config),
        }
    }
}

/// Page-locked memory, so that copies are as asynchronous as in production.
struct Pinned {
    data: *mut u8,
    bytes: usize,
}

impl Pinned {
    fn new(bytes: usize, fill: u8) -> Pinned {
        // SAFETY: a context is current on this thread; the memory is filled before it is read.
        unsafe {
            let data: *mut u8 = result::malloc_host(bytes.max(1), 0)
                .expect("page-locked memory")
                .cast();
            data.write_bytes(fill, bytes);
            Pinned { data, bytes }
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated and filled in `new`; every user of this file waits before it looks.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once, and nothing is in flight.
        unsafe { result::free_host(self.data.cast()) }.expect("page-locked memory is freed");
    }
}

const STAGES: [&str; 3] = ["encode", "phase_b", "decode"];

/// Encode and decode are never shared out.
fn of_stage(name: &str, config: SessionConfig) -> SessionConfig {
    match name {
        "phase_b" => config,
        _ => SessionConfig {
            part: 0,
            parts: 1,
            laps: 1,
            ..config
        },
    }
}

/// Sessions of encode, `phase_b` and decode of either kind, driven with payloads as bytes.
pub(crate) enum Session<'a> {
    Cpu([StageSession; 3]),
    Gpu(&'a Gpu, [RawSession; 3]),
}

/// Bytes behind each row of a frame in page-locked memory.
#[derive(Clone, Copy)]
pub(crate) struct Pad(pub usize);

impl Pad {
    /// Where each plane of a frame lies: its start, stride, bytes of a row, and height; and where the frame ends.
    fn planes(self, config: &SessionConfig) -> (Vec<[usize; 4]>, usize) {
        let mut end = 0;
        let planes = (0..config.chroma.planes())
            .map(|index| {
                let (w, h) = config.chroma.plane_size(index, config.width, config.height);
                let (width, height) = (w as usize * config.bits.bytes(), h as usize);
                let place = [end, width + self.0, width, height];
                end += (width + self.0) * height;
                place
            })
            .collect();
        (planes, end)
    }

    fn view<'f>(self, frame: &'f [u8], config: &SessionConfig) -> FrameView<'f> {
        let mut views = [PlaneView::default(); 3];
        for (view, [start, stride, width, height]) in views.iter_mut().zip(self.planes(config).0) {
            let size = (width / config.bits.bytes(), height);
            let plane = PlaneView::with_bits(&frame[start..], stride, size, config.bits);
            *view = plane.expect("a plane");
        }
        FrameView::new(views)
    }

    fn view_mut<'f>(self, frame: &'f mut [u8], config: &SessionConfig) -> FrameViewMut<'f> {
        let mut views: [PlaneViewMut<'f>; 3] = Default::default();
        let mut rest = frame;
        for (view, [_, stride, width, height]) in views.iter_mut().zip(self.planes(config).0) {
            let (here, after) = rest.split_at_mut(stride * height);
            let size = (width / config.bits.bytes(), height);
            let plane = PlaneViewMut::with_bits(here, stride, size, config.bits);
            *view = plane.expect("a plane");
            rest = after;
        }
        FrameViewMut::new(views)
    }

    /// A packed frame with the bytes behind its rows put in.
    fn spread(self, packed: &[u8], config: &SessionConfig, fill: u8) -> Vec<u8> {
        let mut rest = packed;
        let mut out = Vec::new();
        for [_, _, width, height] in self.planes(config).0 {
            for _ in 0..height {
                let (row, after) = rest.split_at(width);
                out.extend_from_slice(row);
                out.extend(std::iter::repeat_n(fill, self.0));
                rest = after;
            }
        }
        out
    }

    /// The packed frame; the bytes behind its rows must be what they were.
    fn gather(self, spread: &[u8], config: &SessionConfig, fill: u8) -> Vec<u8> {
        let mut out = Vec::new();
        for [start, stride, width, height] in self.planes(config).0 {
            for row in spread[start..][..stride * height].chunks(stride) {
                out.extend_from_slice(&row[..width]);
                let is_untouched = row[width..].iter().all(|byte| *byte == fill);
                assert!(is_untouched, "decode wrote between the rows of a plane");
            }
        }
        out
    }
}

impl<'a> Session<'a> {
    pub(crate) fn cpu(config: SessionConfig) -> Session<'a> {
        let config = SessionConfig {
            space: pp_kernels::Space::Host,
            ..config
        };
        let open = |name| KernelSet::for_host().open_stage(name, &of_stage(name, config), &[]);
        Session::Cpu(STAGES.map(|name| open(name).expect("the cpu kernels open")))
    }

    pub(crate) fn gpu(gpu: &'a Gpu, config: SessionConfig) -> Session<'a> {
        let set = kernels();
        // SAFETY: context and stream are those of `gpu`, which outlives the session; the context is current.
        let open = |name| unsafe { set.open_stage_on_device(name, &of_stage(name, config), &[]) };
        Session::Gpu(
            gpu,
            STAGES.map(|name| open(name).expect("the kernels open")),
        )
    }

    pub(crate) fn config(&self) -> SessionConfig {
        match self {
            Session::Cpu([_, session, _]) => *session.config(),
            Session::Gpu(_, [_, session, _]) => *session.config(),
        }
    }

    /// What `phase_b` gets and gives in this lap; encode and decode must fit a `phase_b` that is in one part.
    pub(crate) fn layout(&mut self, shape: ChunkShape, lap: u32) -> Layout {
        let config = self.config();
        let [source, middle, sink] = match self {
            Session::Cpu(sessions) => sessions.each_mut().map(|session| {
                let lap = lap * u32::from(session.stage().kind == StageKind::Middle);
                session.layout(shape, lap)
            }),
            Session::Gpu(_, sessions) => sessions.each_mut().map(|session| {
                let lap = lap * u32::from(session.stage().kind == StageKind::Middle);
                session.layout(shape, lap)
            }),
        }
        .map(|layout| layout.expect("a layout"));
        if (config.part, lap) == (0, 0) {
            assert_eq!(source.outputs, middle.inputs);
        }
        if (config.part + 1, lap + 1) == (config.parts, config.laps) {
            assert_eq!(middle.outputs, sink.inputs);
        }
        middle
    }

    pub(crate) fn encode(
        &mut self,
        frames: &[Vec<u8>],
        plan: &VideoPlanParts,
        layout: &Layout,
    ) -> Vec<u8> {
        self.encode_from(Pad(0), frames, plan, layout)
    }

    /// The payload for `phase_b`; bytes between tensors are zeroed, as a device leaves them open.
    pub(crate) fn encode_from(
        &mut self,
        pad: Pad,
        frames: &[Vec<u8>],
        plan: &VideoPlanParts,
        layout: &Layout,
    ) -> Vec<u8> {
        let config = self.config();
        let bytes = layout.inputs.payload_bytes() as usize;
        match self {
            Session::Cpu([session, ..]) => {
                let views: Vec<_> = frames.iter().map(|f| Pad(0).view(f, &config)).collect();
                let mut input = vec![0xAA; bytes];
                let mut payload = PayloadMut::new(&layout.inputs, &mut input).expect("a payload");
                session
                    .encode(&views, plan, &mut payload)
                    .expect("cpu encode");
                input
            }
            Session::Gpu(gpu, [session, ..]) => {
                let spread: Vec<_> = frames
                    .iter()
                    .flat_map(|f| pad.spread(f, &config, 7))
                    .collect();
                let mut pinned = Pinned::new(spread.len(), 0);
                pinned.bytes_mut().copy_from_slice(&spread);
                let views: Vec<_> = pinned
                    .bytes_mut()
                    .chunks(pad.planes(&config).1)
                    .map(|f| pad.view(f, &config))
                    .collect();
                let slot = Slot::new(gpu, &vec![0xAA; bytes]);
                let mut payload =
                    PayloadMut::on_device(&layout.inputs, slot.address, bytes).expect("a payload");
                // SAFETY: the context is current; slot and frames live beyond `read`, which waits.
                unsafe { session.encode(&views, plan, &mut payload) }.expect("gpu encode");
                let mut input = slot.read(gpu);
                let tensors = &layout.inputs;
                for ((at, spec), (next, _)) in tensors.iter().zip(tensors.iter().skip(1)) {
                    input[(at + spec.bytes()) as usize..next as usize].fill(0);
                }
                input
            }
        }
    }

    pub(crate) fn phase_b(
        &mut self,
        plan: &VideoPlanParts,
        layout: &Layout,
        input: &[u8],
    ) -> Vec<u8> {
        self.phase_b_in_lap(plan, 0, layout, input)
    }

    pub(crate) fn phase_b_in_lap(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        layout: &Layout,
        input: &[u8],
    ) -> Vec<u8> {
        let bytes = layout.outputs.payload_bytes() as usize;
        let (output, calls) = match self {
            Session::Cpu([_, session, _]) => {
                let mut output = vec![0xAA; bytes];
                let calls = session.run(
                    plan,
                    lap,
                    &Payload::new(&layout.inputs, input).expect("a payload"),
                    &mut PayloadMut::new(&layout.outputs, &mut output).expect("a payload"),
                    None,
                );
                (output, calls)
            }
            Session::Gpu(gpu, [_, session, _]) => {
                let (from, to) = (Slot::new(gpu, input), Slot::new(gpu, &vec![0xAA; bytes]));
                // SAFETY: the context is current; both slots live beyond `read`, which waits.
                let calls = unsafe {
                    session.run(
                        plan,
                        lap,
                        &Payload::on_device(&layout.inputs, from.address, input.len())
                            .expect("a payload"),
                        &mut PayloadMut::on_device(&layout.outputs, to.address, bytes)
                            .expect("a payload"),
                        None,
                    )
                };
                let output = to.read(gpu);
                assert!(from.read(gpu) == input, "phase_b wrote into its input");
                (output, calls)
            }
        };
        let calls = calls.expect("phase_b");
        let config = self.config();
        let passes = pass_range(
            plan.num_denoise_steps,
            (lap * config.parts + config.part) as usize,
            (config.laps * config.parts) as usize,
        );
        let expected = passes.len() as u32 + u32::from(plan.do_kv_recompute);
        assert_eq!(calls, expected);
        output
    }

    pub(crate) fn decode(
        &mut self,
        plan: &VideoPlanParts,
        layout: &Layout,
        output: &[u8],
    ) -> Vec<Vec<u8>> {
        self.decode_to(Pad(0), plan, layout, output)
    }

    /// The frames.
    pub(crate) fn decode_to(
        &mut self,
        pad: Pad,
        plan: &VideoPlanParts,
        layout: &Layout,
        output: &[u8],
    ) -> Vec<Vec<u8>> {
        let config = self.config();
        let frames = layout
            .outputs
            .iter()
            .next()
            .expect("an output")
            .1
            .shape()
            .dims()[0] as usize;
        let size = FrameGeometry::of(&config).frame_bytes();
        match self {
            Session::Cpu([.., session]) => {
                let mut decoded = vec![vec![0; size]; frames];
                let mut views: Vec<_> = decoded
                    .iter_mut()
                    .map(|f| Pad(0).view_mut(f, &config))
                    .collect();
                session
                    .decode(
                        plan,
                        &Payload::new(&layout.outputs, output).expect("a payload"),
                        &mut views,
                    )
                    .expect("cpu decode");
                decoded
            }
            Session::Gpu(gpu, [.., session]) => {
                let size = pad.planes(&config).1;
                let mut pinned = Pinned::new(size * frames, 0x55);
                let slot = Slot::new(gpu, output);
                let mut views: Vec<_> = pinned
                    .bytes_mut()
                    .chunks_mut(size)
                    .map(|f| pad.view_mut(f, &config))
                    .collect();
                let payload = Payload::on_device(&layout.outputs, slot.address, output.len())
                    .expect("a payload");
                // SAFETY: the context is current; slot and frames live beyond `read`, which waits.
                unsafe { session.decode(plan, &payload, &mut views) }.expect("gpu decode");
                assert!(slot.read(gpu) == output, "decode wrote into its input");
                pinned
                    .bytes_mut()
                    .chunks(size)
                    .map(|f| pad.gather(f, &config, 0x55))
                    .collect()
            }
        }
    }
}

/// Device memory with guard bytes behind it.
pub(crate) struct Slot {
    memory: cudarc::driver::CudaSlice<u8>,
    pub(crate) address: u64,
    bytes: usize,
}

const GUARD: [u8; 256] = [0xC3; 256];

impl Slot {
    pub(crate) fn new(gpu: &Gpu, bytes: &[u8]) -> Slot {
        let bytes_and_guard = [bytes, &GUARD].concat();
        let memory = gpu
            .stream
            .clone_htod(&bytes_and_guard)
            .expect("device memory");
        // The copy may still read them.
        gpu.stream.synchronize().expect("the stream is sound");
        drop(bytes_and_guard);
        let address = memory.device_ptr(&gpu.stream).0;
        Slot {
            memory,
            address,
            bytes: bytes.len(),
        }
    }

    /// Waits for the stream and reads.
    pub(crate) fn read(&self, gpu: &Gpu) -> Vec<u8> {
        let mut bytes = gpu
            .stream
            .clone_dtoh(&self.memory)
            .expect("the stream has done its work");
        gpu.stream.synchronize().expect("the stream is sound");
        assert!(
            bytes.split_off(self.bytes) == GUARD,
            "something was written behind the payload"
        );
        bytes
    }
}
