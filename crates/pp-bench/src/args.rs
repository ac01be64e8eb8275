//! The command lines of `pp bench` and `pp plan`.

use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand, ValueEnum};
use pp_command::{Input, KernelChoices, TransportChoice, plugin_arg, whole};
use pp_contract::DeviceName;
use pp_contract::pipeline::{MAX_DEPTH, MAX_RANKS};
use pp_kernels::denoise::settings::DEFAULT_STEPS;

/// The commands of `pp bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// How well stages overlap.
    Overlap(OverlapArgs),
    /// What the edges carry: one way and round trip, by size.
    Link(LinkArgs),
    /// What the CUDA kernels reach on this machine's first GPU.
    Kernels(KernelsArgs),
    /// How fast a clip is read and written, without stages between.
    Video(VideoArgs),
}

fn milliseconds(text: &str) -> Result<f64, String> {
    let ms = text.parse().ok().filter(|ms| (0.0..=60_000.0).contains(ms));
    ms.ok_or_else(|| "it takes milliseconds from 0 to 60000".into())
}

fn per_second(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate| (0.1..=1e4).contains(rate));
    rate.ok_or_else(|| "it takes a rate from 0.1 to 10000".into())
}

/// What a simulated stage does with its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Simulate {
    /// Sleep, then spin the rest to the mark: a stage that leaves its core to others.
    Sleep,
    /// Compute for so much time of a core: a stage that needs its core.
    Spin,
    /// A GPU kernel that spins on the GPU's clock (with --transport p2p or nccl).
    GpuSpin,
    /// bf16 matrix products on the GPU.
    Gemm,
    /// Reads and writes of GPU memory.
    Hbm,
}

/// The arguments of `pp bench overlap`.
#[derive(Args, Clone, Debug)]
pub struct OverlapArgs {
    /// Duration of each stage in milliseconds, 0 to 60000: that of the source first, that of the sink last. Each stands
    /// on a rank of its own, unless --pipeline says where; by default 0, --phase-b-ms and --decode-ms, on two ranks.
    #[arg(long, value_name = "F,F,…", value_delimiter = ',', value_parser = milliseconds)]
    #[arg(conflicts_with_all = ["decode_ms", "phase_b_ms"])]
    pub(crate) stages: Option<Vec<f64>>,
    /// Where the stages stand, with the names s0 for the source, s1 and so on, as in "s0@0 -> s1@1 -> s2@0".
    #[arg(long, value_name = "TEXT")]
    pub(crate) pipeline: Option<String>,
    /// Without --stages: duration of s2, the only work of rank 0, in milliseconds, 0 to 60000.
    #[arg(long, value_name = "F", default_value = "5", value_parser = milliseconds)]
    pub(crate) decode_ms: f64,
    /// Without --stages: duration of s1, which stands on rank 1, in milliseconds, 0 to 60000.
    #[arg(long, value_name = "F", default_value = "5", value_parser = milliseconds)]
    pub(crate) phase_b_ms: f64,
    /// Payload bytes over each edge, 0 to 18446744073709551615, as far as there is memory.
    #[arg(long, value_name = "N", default_value_t = 22_118_400, value_parser = whole(0..=u64::MAX))]
    pub(crate) bytes: u64,
    /// Chunks to run, 2 to 18446744073709551615, the first of them to warm up; by default about two seconds' worth.
    #[arg(long, value_name = "N", value_parser = whole(2..=u64::MAX))]
    pub(crate) chunks: Option<u64>,
    /// Most chunks in flight, 1 to 256: the slots of each edge; by default two, and one more for each edge with payloads
    /// and for each group.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_DEPTH))]
    pub(crate) depth: Option<u32>,
    /// What the stages do with their time. By default stages on CPUs sleep, and stages on GPUs spin there. Where CPUs stand
    /// beside GPUs, this is for the GPUs, and the CPUs sleep; with spin both spin.
    #[arg(long, value_enum)]
    pub(crate) simulate: Option<Simulate>,
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "host")]
    pub(crate) transport: TransportChoice,
    /// The device of each rank, as for pp run. With a GPU give --transport, too.
    #[arg(long, value_name = "cpu|cuda|cuda:N,...", value_delimiter = ',', action = ArgAction::Set)]
    pub(crate) devices: Vec<DeviceName>,
    /// Say what payloads of --bytes cost beside payloads of N bytes, 1 to 18446744073709551615: blocks of 48 chunks
    /// have N and --bytes in turn, and the first pair of blocks warms up. 37 pairs unless --chunks says otherwise,
    /// which must be 192 or more; by default all payloads have --bytes.
    #[arg(long, value_name = "N", value_parser = whole(1..=u64::MAX), conflicts_with = "sync")]
    pub(crate) against: Option<u64>,
    /// One chunk at a time: what it costs without overlap.
    #[arg(long)]
    pub(crate) sync: bool,
    /// A source that does not wait: so many chunks a second are there, 0.1 to 10000, and late ones are dropped; --chunks counts
    /// those, too; by default the source waits.
    #[arg(long, value_name = "F", value_parser = per_second, conflicts_with_all = ["against", "sync"])]
    pub(crate) per_second: Option<f64>,
    /// With --per-second: the latency that no chunk is to exceed, in milliseconds, 0 to 60000; by default none.
    #[arg(long, value_name = "F", value_parser = milliseconds, requires = "per_second")]
    pub(crate) max_latency_ms: Option<f64>,
    /// Producers write fresh bytes into every payload and consumers read every byte; else payloads
    /// are handed over untouched.
    #[arg(long)]
    pub(crate) touch: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a Chrome/Perfetto trace.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) trace: Option<PathBuf>,
    /// Draw the last chunks as a picture.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) timeline: Option<PathBuf>,
}

/// The arguments of `pp bench link`.
#[derive(Args, Clone, Debug)]
pub struct LinkArgs {
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "host")]
    pub(crate) transport: TransportChoice,
    /// The device of each rank, as for pp run. With a GPU give --transport, too.
    #[arg(long, value_name = "cpu|cuda|cuda:N,...", value_delimiter = ',', action = ArgAction::Set)]
    pub(crate) devices: Vec<DeviceName>,
    /// Largest payload in bytes, 4 to 1073741824; each edge has slots of this size.
    #[arg(long, value_name = "N", default_value_t = 64 << 20, value_parser = whole(4..=1_u64 << 30))]
    pub(crate) max_bytes: u64,
    /// Slots of each edge, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=MAX_DEPTH))]
    pub(crate) depth: u32,
    /// NCCL communicators that return at once and are asked until they are done.
    #[arg(long)]
    pub(crate) non_blocking: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `pp bench kernels`.
#[derive(Args, Clone, Debug)]
pub struct KernelsArgs {
    /// Width of the frames, 16 to 16384.
    #[arg(long, value_name = "N", default_value_t = 1280, value_parser = whole(16..=16384_u32))]
    pub(crate) width: u32,
    /// Height of the frames, 16 to 16384.
    #[arg(long, value_name = "N", default_value_t = 720, value_parser = whole(16..=16384_u32))]
    pub(crate) height: u32,
    /// Frames in a chunk, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=256_u32))]
    pub(crate) frames_per_chunk: u32,
    /// Denoising steps, 0 to 1024.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, value_parser = whole(0..=1024_u32))]
    pub(crate) denoise_steps: u32,
    /// Runs, 1 to 10000, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = whole(1..=10000_u32))]
    pub(crate) runs: u32,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `pp bench video`.
#[derive(Args, Clone, Debug)]
pub struct VideoArgs {
    #[command(flatten)]
    pub(crate) input: Input,
    /// Where to write as many frames as Y4M; without it only reading is measured.
    #[arg(short, long, value_name = "FILE.y4m")]
    pub(crate) output: Option<PathBuf>,
    /// Frames that travel together, from 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=256_u32))]
    pub(crate) frames_per_chunk: u32,
    /// Runs, of which the median counts, from 1 to 1000.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = whole(1..=1000_u32))]
    pub(crate) runs: u32,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `pp plan`.
#[derive(Args, Clone, Debug)]
pub struct PlanArgs {
    /// Most ranks that the stages may stand on, 1 to 64.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = whole(1..=MAX_RANKS))]
    pub(crate) ranks: u32,
    /// Place stages that compute for so many milliseconds, 0 to 60000, that of the source first; by default the stages of
    /// pp run are placed.
    #[arg(long, value_name = "F,F,…", value_delimiter = ',', value_parser = milliseconds)]
    #[arg(conflicts_with_all = ["input", "file", "width", "height", "denoise_steps", "frames_per_chunk"])]
    #[arg(conflicts_with_all = ["kernels", "plugin_args", "transport", "threads"])]
    pub(crate) stages: Option<Vec<f64>>,
    /// With --stages: payload bytes over each edge, 0 to 18446744073709551615, as far as there is memory.
    #[arg(long, value_name = "N", default_value_t = 22_118_400, value_parser = whole(0..=u64::MAX))]
    pub(crate) bytes: u64,
    #[command(flatten)]
    pub(crate) input: Input,
    /// Width of the noise, 16 to 16384.
    #[arg(long, value_name = "N", default_value_t = 1280, value_parser = whole(16..=16384_u32))]
    #[arg(conflicts_with_all = ["input", "file"])]
    pub(crate) width: u32,
    /// Height of the noise, 16 to 16384.
    #[arg(long, value_name = "N", default_value_t = 720, value_parser = whole(16..=16384_u32))]
    #[arg(conflicts_with_all = ["input", "file"])]
    pub(crate) height: u32,
    /// Kernels, as for pp run.
    #[arg(
        long,
        value_name = "auto|cpu|ptx|FILE.so|STAGE=...",
        default_value = "auto"
    )]
    pub(crate) kernels: KernelChoices,
    /// An argument for the plugin; may be given several times, each key once.
    #[arg(long = "plugin-arg", value_name = "KEY=VALUE", value_parser = plugin_arg)]
    pub(crate) plugin_args: Vec<(String, String)>,
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) transport: TransportChoice,
    /// Denoising steps, 0 to 1024.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, value_parser = whole(0..=1024_u32))]
    pub(crate) denoise_steps: u32,
    /// Frames that travel together, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=256_u32))]
    pub(crate) frames_per_chunk: u32,
    /// Threads for each stage between source and sink, 0 to 1024; 0 takes one for each core.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole(0..=1024_u32))]
    pub(crate) threads: u32,
    /// Chunks of each run, 2 to 1000000, the first of them to warm up; by default 24, and with --stages 200.
    #[arg(long, value_name = "N", value_parser = whole(2..=1_000_000_u64))]
    pub(crate) chunks: Option<u64>,
    /// Runs of each pipeline, 1 to 100, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = whole(1..=100_u32))]
    pub(crate) rounds: u32,
    /// Run every placement, and say which is the best.
    #[arg(long)]
    pub(crate) all: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}
