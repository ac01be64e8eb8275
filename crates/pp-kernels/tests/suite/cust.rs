//! The plugin on cust does what the built-in CUDA kernels do: the same bytes, and the same launches in the same order,
//! on a driver that is not real. On a real one, `gpu_oracle` compares what they compute.

use std::fs;

use pp_fakes::raw::{Handle, device};
use pp_fakes::{Fakes, ok};
use pp_kernels::{
    Chroma, ChunkShape, DType, FrameGeometry, FrameView, FrameViewMut, KernelSet, Payload,
    PayloadMut, RawSession, SessionConfig, VideoPlanParts, abi,
};

use crate::common::rust_plugin;
use crate::recorded;

const SIZE: (u32, u32) = (52, 38);
const CHROMA: Chroma = Chroma::C420;
const MOST_FRAMES: u32 = 5;

/// A device with a stream, current on this thread.
struct Device {
    context: Handle,
    stream: Handle,
}

impl Device {
    fn new() -> Device {
        let (context, stream) = device(0);
        Device { context, stream }
    }

    fn open(&self, set: &KernelSet, sigma: Option<f32>) -> [RawSession; 3] {
        let config = SessionConfig {
            noise_sigma: sigma,
            ..SessionConfig::cuda(
                SIZE.0,
                SIZE.1,
                CHROMA,
                MOST_FRAMES,
                self.context as u64,
                self.stream as u64,
            )
        };
        // SAFETY: the context is current and lives, with its stream, as long as the process.
        set.three_stages()
            .unwrap()
            .map(|name| unsafe { set.open_stage_on_device(name, &config, &[]) }.unwrap())
    }

    fn memory(&self, bytes: usize) -> u64 {
        let mut address = 0;
        ok!(alloc(&mut address, bytes));
        ok!(fill(address, 0xAA, bytes, self.stream));
        address
    }

    fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        ok!(download(
            read.as_mut_ptr().cast(),
            address,
            bytes,
            self.stream
        ));
        ok!(stream_synchronize(self.stream));
        read
    }
}

fn geometry() -> FrameGeometry {
    FrameGeometry::of(&SessionConfig::host(SIZE.0, SIZE.1, CHROMA, MOST_FRAMES))
}

/// Frames that differ from each other.
fn frames(count: u32) -> Vec<Vec<u8>> {
    let bytes = geometry().frame_bytes();
    let frame = |n: u32| (0..bytes as u32).map(move |i| (i * 7 + i / 52 * 31 + n * 101) as u8);
    (0..count).map(|n| frame(n).collect()).collect()
}

/// What one chunk gave: the tensors for `phase_b`, and the frames decoded from what came of it.
#[derive(PartialEq)]
struct Chunk {
    input: Vec<u8>,
    calls: u32,
    decoded: Vec<Vec<u8>>,
}

fn chunk(
    device: &Device,
    [source, middle, sink]: &mut [RawSession; 3],
    plan: &VideoPlanParts,
    original: &[Vec<u8>],
    context: u32,
) -> Chunk {
    let shape = ChunkShape {
        frames: original.len() as u32,
        steps: plan.num_denoise_steps,
        context_frames: context,
    };
    let layout = middle.layout(shape, 0).unwrap();
    assert_eq!(layout.inputs, source.layout(shape, 0).unwrap().outputs);
    assert_eq!(layout.outputs, sink.layout(shape, 0).unwrap().inputs);
    let (up, down) = (
        layout.inputs.payload_bytes() as usize,
        layout.outputs.payload_bytes() as usize,
    );
    let (input, output) = (device.memory(up), device.memory(down));
    let views: Vec<_> = original
        .iter()
        .map(|frame| FrameView::packed(frame, &geometry()).unwrap())
        .collect();
    let mut decoded = vec![vec![0x55; original[0].len()]; original.len()];
    let mut decoded_views: Vec<_> = decoded
        .iter_mut()
        .map(|frame| FrameViewMut::packed(frame, &geometry()).unwrap())
        .collect();
    // SAFETY: the context is current; payloads and frames live until `read` has waited for the stream.
    let calls = unsafe {
        let mut payload = PayloadMut::on_device(&layout.inputs, input, up).unwrap();
        source.encode(&views, plan, &mut payload).unwrap();
        let payload = Payload::on_device(&layout.inputs, input, up).unwrap();
        let mut result = PayloadMut::on_device(&layout.outputs, output, down).unwrap();
        let calls = middle.run(plan, 0, &payload, &mut result, None).unwrap();
        let result = Payload::on_device(&layout.outputs, output, down).unwrap();
        sink.decode(plan, &result, &mut decoded_views).unwrap();
        calls
    };
    let input = device.read(input, up);
    Chunk {
        input,
        calls,
        decoded,
    }
}

/// Chunks of all sizes, with and without recompute, after a cut, and with passes.
fn stream(device: &Device, set: &KernelSet, sigma: Option<f32>, steps: u32) -> Vec<Chunk> {
    let mut sessions = device.open(set, sigma);
    let all = frames(20);
    let first = VideoPlanParts::first(SIZE.0, SIZE.1, steps);
    let cut = |start| VideoPlanParts {
        reset_kv_cache: true,
        reset_crossattn_cache: true,
        ..first.following(start, false)
    };
    let chunks = [
        (first, 0..1, 0),
        (first.following(1, true), 1..2, 1),
        (first.following(2, true), 2..7, 2),
        (first.following(7, false), 7..10, 0),
        (cut(10), 10..14, 0),
        (first.following(14, true), 14..19, 1),
        (first.following(19, false), 19..20, 0),
    ];
    chunks
        .into_iter()
        .map(|(plan, range, context)| chunk(device, &mut sessions, &plan, &all[range], context))
        .collect()
}

/// The launches and copies between two marks of a recording, without addresses.
fn work(recording: &str, name: &str) -> Vec<String> {
    let begin = format!("Mark name={name}");
    let lines = recording.lines().skip_while(|line| !line.contains(&begin));
    let lines = lines
        .skip(1)
        .take_while(|line| !line.contains("Mark name="));
    lines
        .filter_map(|line| line.find("cuLaunchKernel").map(|at| &line[at..]))
        .map(|line| {
            let words = line.split(' ').filter(|word| !word.starts_with("st="));
            let words = words.map(|word| match word.split_once('=') {
                Some((key @ ("r" | "w"), ranges)) => {
                    let sizes = ranges
                        .split(',')
                        .filter_map(|range| range.split(':').nth(1));
                    format!("{key}={}", sizes.collect::<Vec<_>>().join(","))
                }
                _ => word.to_owned(),
            });
            words.collect::<Vec<_>>().join(" ")
        })
        .collect()
}

#[test]
fn the_plugin_launches_and_gives_what_the_built_in_kernels_do() {
    if !pp_testing::alone!() {
        return;
    }
    let (loaded, records) = recorded("cust-records");
    let device = Device::new();
    let ptx = KernelSet::for_device();
    let cust = KernelSet::load(&rust_plugin("pp-plugin-cust")).unwrap();
    assert_eq!(cust.describe().digest, ptx.describe().digest);
    let cases = [(None, 0), (Some(12.5), 0), (None, 2)];
    for (sigma, steps) in cases {
        loaded.note(&format!("Mark name=ptx{steps}{sigma:?}"));
        let ours = stream(&device, &ptx, sigma, steps);
        loaded.note(&format!("Mark name=cust{steps}{sigma:?}"));
        let theirs = stream(&device, &cust, sigma, steps);
        for (index, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            assert!(
                ours.input == theirs.input,
                "tensors of chunk {index}, {sigma:?}"
            );
            assert_eq!(ours.calls, theirs.calls);
            assert!(ours.decoded == theirs.decoded, "frames of chunk {index}");
        }
        if steps == 0 {
            let decoded: Vec<_> = theirs.into_iter().flat_map(|chunk| chunk.decoded).collect();
            assert!(decoded == frames(20), "zero steps is the identity");
        }
    }
    loaded.note("Mark name=end");
    let recording = records.file(&format!("{}.rec", std::process::id()));
    let recording = fs::read_to_string(&recording).unwrap();
    for (sigma, steps) in cases {
        let ours = work(&recording, &format!("ptx{steps}{sigma:?}"));
        let theirs = work(&recording, &format!("cust{steps}{sigma:?}"));
        assert!(ours.len() > 20, "{ours:?}");
        for (index, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            assert_eq!(ours, theirs, "launch {index}");
        }
        assert_eq!(ours.len(), theirs.len());
    }
}

/// Calls the plugin's table as a host of another make does, which may check less than ours.
#[test]
#[expect(
    clippy::too_many_lines,
    reason = "one call of the table after the other"
)]
fn more_frames_than_there_is_memory_for_are_refused_by_the_plugin_itself() {
    const FRAMES: u32 = MOST_FRAMES + 1;
    if !pp_testing::alone!() {
        return;
    }
    Fakes::newest().load();
    let device = Device::new();
    let file = rust_plugin("pp-plugin-cust");
    // SAFETY: the plugin was built just now; its entry has this type, and is never unloaded.
    let table = unsafe {
        let library = libloading::os::unix::Library::new(&file).unwrap();
        let entry = *library.get::<abi::EntryFn>(abi::ENTRY_SYMBOL).unwrap();
        std::mem::forget(library);
        &*entry()
    };
    let config = abi::PpSessionConfig {
        struct_size: abi::size::<abi::PpSessionConfig>(),
        space: abi::SPACE_CUDA,
        width: SIZE.0,
        height: SIZE.1,
        chroma: CHROMA as u32,
        max_frames: MOST_FRAMES,
        threads: 1,
        noise_sigma: 12.5,
        device: device.context as u64,
        stream: device.stream as u64,
        stage: 2,
        part: 0,
        parts: 1,
        laps: 1,
        member: 0,
        members: 1,
        arg_count: 0,
        bits: 0,
        args: std::ptr::null(),
    };
    let plan = abi::PpPlan {
        struct_size: abi::size::<abi::PpPlan>(),
        height: SIZE.1,
        width: SIZE.0,
        num_denoise_steps: 0,
        expected_generator_calls: 0,
        do_kv_recompute: 0,
        init_cache: 1,
        reset_kv_cache: 0,
        reset_crossattn_cache: 0,
        kv_cache_attention_bias: 0.0,
        noise_scale: 1.0,
        skipped_frames: 0,
        current_start_frame: 0,
        base_seed: 0,
        context_skipped: [0; _],
    };

    let tokens = pp_kernels::denoise::geometry::Geometry::new(SIZE.0, SIZE.1, CHROMA).tokens as u64;
    let dims = [u64::from(FRAMES), tokens, 64, 0, 0, 0, 0, 0];
    let mut tensor = abi::PpTensor {
        name: [0; 48],
        dtype: abi::dtype_code(DType::Bf16),
        ndim: 3,
        dims,
        offset: 0,
        bytes: 2 * dims[..3].iter().product::<u64>(),
    };
    tensor.name[..11].copy_from_slice(b"latents_out");
    let payload = abi::PpPayload {
        struct_size: abi::size::<abi::PpPayload>(),
        tensor_count: 1,
        tensors: &raw const tensor,
        data: std::ptr::without_provenance_mut(device.memory(tensor.bytes as usize) as usize),
        bytes: tensor.bytes,
    };
    let mut samples = frames(FRAMES);
    let frames: Vec<_> = samples.iter_mut().map(|frame| raw_frame(frame)).collect();
    let mut decode = abi::PpRunArgs {
        struct_size: abi::size::<abi::PpRunArgs>(),
        lap: 0,
        frame_count: FRAMES,
        observed_generator_calls: 0,
        plan: &raw const plan,
        frames: frames.as_ptr(),
        input: &raw const payload,
        output: std::ptr::null(),
        group: std::ptr::null(),
    };
    let mut geometry = abi::PpGeometry {
        struct_size: abi::size::<abi::PpGeometry>(),
        width: SIZE.0,
        height: SIZE.1,
        chroma: CHROMA as u32,
        frames_per_frame: 1,
        bits: 0,
    };
    let mut text = [0; 200];
    let mut error = abi::ErrorText {
        struct_size: abi::size::<abi::ErrorText>(),
        reserved: 0,
        text: text.as_mut_ptr(),
        capacity: text.len() as u64,
        length: 0,
    };
    let mut session = std::ptr::null_mut();
    // SAFETY: context and stream live; so do all structs, the payload's memory and the frames, until the wait below.
    let (created, status) = unsafe {
        let create = table.create.unwrap();
        let created = create(
            &raw const config,
            &raw mut geometry,
            &raw mut session,
            &raw mut error,
        );
        let status = table.run.unwrap()(session, &raw mut decode, &raw mut error);
        table.destroy.unwrap()(session);
        (created, status)
    };
    ok!(stream_synchronize(device.stream));
    assert_eq!(created, abi::OK);
    assert_eq!(status, abi::INVALID_ARGUMENT);
    let said = String::from_utf8_lossy(&text[..error.length as usize]);
    assert_eq!(said, "6 frames in a chunk, the session takes 1 to 5");
}

/// The planes of a packed frame.
fn raw_frame(frame: &mut [u8]) -> abi::PpFrame {
    let mut rest = frame;
    abi::PpFrame {
        planes: std::array::from_fn(|index| {
            let (width, height) = CHROMA.plane_size(index, SIZE.0, SIZE.1);
            let (plane, after) = std::mem::take(&mut rest).split_at_mut((width * height) as usize);
            rest = after;
            abi::PpPlane {
                data: plane.as_mut_ptr(),
                stride: width.into(),
                width,
                height,
            }
        }),
    }
}
