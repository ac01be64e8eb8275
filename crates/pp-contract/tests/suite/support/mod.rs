//! What the integration tests share: messages as a job would send them.

pub(crate) mod decoders;

use std::sync::LazyLock;

use pp_contract::*;

/// One rank for each stage.
pub(crate) fn pipeline() -> &'static Pipeline {
    static LINE: LazyLock<Pipeline> = LazyLock::new(|| parse("encode@0,phase_b@1,decode@2"));
    &LINE
}

/// Stages 1 and 2 are walked once for each step of the plan.
pub(crate) fn ring() -> &'static Pipeline {
    static RING: LazyLock<Pipeline> =
        LazyLock::new(|| parse("encode@0,(phase_b@1,guide@2)*steps,decode@0"));
    &RING
}

pub(crate) fn parse(text: &str) -> Pipeline {
    text.parse()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A plan of 4 steps with recompute: 5 calls.
pub(crate) fn plan_parts() -> VideoPlanParts {
    VideoPlanParts {
        height: 288,
        width: 352,
        current_start_frame: 16,
        do_kv_recompute: true,
        num_denoise_steps: 4,
        expected_generator_calls: 5,
        init_cache: false,
        reset_kv_cache: false,
        reset_crossattn_cache: true,
        base_seed: 1_234_567,
        kv_cache_attention_bias: 0.5,
        noise_scale: 20.0,
        skipped_frames: 3,
        context_skipped: [0, 2, 0, 0, 0, 0, 0, 0],
    }
}

pub(crate) fn tensor(name: &str, dtype: DType, dims: &[u64]) -> TensorSpec {
    TensorSpec::new(name, dtype, dims).expect("a well-formed tensor")
}

pub(crate) fn inputs() -> Manifest {
    Manifest::new(&[
        tensor("latents_in", DType::Bf16, &[4, 1584, 192]),
        tensor("conditioning_embeds", DType::Bf16, &[0]),
        tensor("denoising_step_list", DType::I64, &[4]),
        tensor("context_frames", DType::Bf16, &[1, 1584, 192]),
    ])
    .expect("a well-formed manifest")
}

pub(crate) fn outputs() -> Manifest {
    Manifest::new(&[tensor("latents_out", DType::Bf16, &[4, 1584, 192])])
        .expect("a well-formed manifest")
}

pub(crate) fn plan() -> VideoPlan {
    VideoPlan::new(plan_parts()).expect("a valid plan")
}

/// What encode sends.
pub(crate) fn message() -> Message<VideoPlan> {
    Message::new(plan(), &pipeline().stages()[0], inputs()).expect("a valid message")
}

/// A report of the chunk that says so many calls.
pub(crate) fn report(calls: u32) -> StageReport {
    StageReport {
        calls,
        start_frame: 16,
        work_us: 15_000,
        ..StageReport::default()
    }
}

/// What `phase_b` hands on.
pub(crate) fn handed_on() -> Message<VideoPlan> {
    let message = message().hand_on(pipeline(), (1, 0), outputs(), &report(5));
    message.expect("it follows the plan")
}

/// What decode sends to the source.
pub(crate) fn accepted() -> Message<VideoPlan> {
    let decode = StageReport {
        work_us: 128,
        ..report(1)
    };
    handed_on()
        .accepted(pipeline(), &decode, Vec::new())
        .expect("it fits")
}

pub(crate) fn hello_parts(rank: u32) -> HelloParts {
    let mut settings = Settings::new();
    settings.set("touch", "no").expect("within the bounds");
    settings.set("depth", 4).expect("within the bounds");
    HelloParts {
        job: 0x1122,
        rank: Rank::new(rank),
        world_size: WorldSize::new(2).expect("not empty"),
        plan_name: Text::truncated("video"),
        plan_version: 1,
        settings,
        device_settings: Settings::new(),
        chunks: Some(100),
        host: Text::truncated("host-a"),
        device: None,
        device_given: None,
        device_named: false,
    }
}

pub(crate) fn hello(rank: u32) -> Hello {
    Hello::new(hello_parts(rank)).expect("a rank of the world")
}

pub(crate) fn fault() -> Fault {
    let rank = Rank::new(1);
    let fault = Fault::new(
        FaultKind::PeerDied,
        rank,
        "receive",
        "socket closed\nat byte 3",
    );
    fault.in_stage("b 1/2", Some(ChunkIndex::new(300)))
}

/// The stamp of chunk `n`, and of the call of this number.
pub(crate) fn stamp(n: u64) -> Stamp {
    Stamp::new(ChunkIndex::new(n), CacheEpoch::new(0), CallId::new(n))
}

/// The frame of a message that is the first of its edge.
pub(crate) fn frame_of<P: Plan>(message: &Message<P>, stamp: Stamp) -> Vec<u8> {
    let mut composer = Composer::new();
    let prepared = composer.prepare(message).expect("it fits");
    let sent = prepared.commit(&mut Sequencer::new(), stamp);
    sent.frame().to_vec()
}

pub(crate) fn bare_frame(bare: Bare, stamp: Stamp) -> Vec<u8> {
    let mut composer = Composer::new();
    let sent = composer
        .prepare_bare(bare)
        .commit(&mut Sequencer::new(), stamp);
    sent.frame().to_vec()
}

/// One frame of each kind, as the first of its edge, and the stage that sends it.
pub(crate) fn first_frames() -> Vec<(&'static str, usize, Vec<u8>)> {
    let of = |message| frame_of(&message, stamp(0));
    vec![
        ("noop", 0, bare_frame(Bare::Noop, stamp(0))),
        ("shutdown", 0, bare_frame(Bare::Shutdown, stamp(0))),
        ("message", 0, of(message())),
        ("handed on", 1, of(handed_on())),
        ("accepted", 2, of(accepted())),
        ("stale", 1, of(message().overtaken())),
    ]
}

pub(crate) fn first_frame(wanted: &str) -> Vec<u8> {
    let mut frames = first_frames().into_iter();
    let frame = frames.find(|(name, ..)| *name == wanted);
    frame.expect("a kind of frame").2
}

pub(crate) fn admit(frame: &[u8]) -> Result<Matched<'_>, LockstepError> {
    Lockstep::new().admit(frame)
}

/// Decodes the first frame of an edge of [`pipeline`], from stage `maker`.
pub(crate) fn decode(frame: &[u8], maker: usize) -> Result<Message<VideoPlan>, BodyError> {
    admit(frame)
        .expect("it is in order")
        .message(pipeline(), maker)
}

/// The frame with `change` made to its 60 checked bytes and its body, and checksums that fit: what
/// a peer sends that is wrong on purpose.
pub(crate) fn forge(frame: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut forged = frame.to_vec();
    change(&mut forged);
    let body_crc = crc32(&forged[64..]);
    forged[52..56].copy_from_slice(&body_crc.to_le_bytes());
    let header_crc = crc32(&forged[..60]);
    forged[60..64].copy_from_slice(&header_crc.to_le_bytes());
    forged
}

/// CRC-32 as in IEEE 802.3, bit by bit: an oracle apart from the crate that is tested.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    })
}
