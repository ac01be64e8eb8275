//! What the integration tests share: a stream of messages as a job would send them.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use pp_contract::*;

/// A plan of 4 steps with recompute: 5 calls.
pub fn plan_parts() -> VideoPlanParts {
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
    }
}

pub fn tensor(name: &str, dtype: DType, dims: &[u64]) -> TensorSpec {
    TensorSpec::new(name, dtype, dims).expect("a well-formed tensor")
}

pub fn inputs() -> Manifest {
    Manifest::new(&[
        tensor("latents_in", DType::Bf16, &[4, 1584, 192]),
        tensor("conditioning_embeds", DType::Bf16, &[0]),
        tensor("denoising_step_list", DType::I64, &[4]),
        tensor("context_frames", DType::Bf16, &[1, 1584, 192]),
    ])
    .expect("a well-formed manifest")
}

pub fn outputs() -> Manifest {
    Manifest::new(&[tensor("latents_out", DType::Bf16, &[4, 1584, 192])])
        .expect("a well-formed manifest")
}

pub fn envelope() -> Envelope<VideoPlan> {
    let plan = VideoPlan::new(plan_parts()).expect("a valid plan");
    Envelope::new(plan, inputs(), outputs()).expect("a valid envelope")
}

pub fn outcome() -> Outcome {
    Outcome {
        observed_calls: 5,
        phase_b_us: 15_000,
        idle_us: 0,
        start_frame: 16,
        seal: Some(Seal {
            digest: 300,
            cost_us: 1,
        }),
        outputs: outputs(),
    }
}

pub fn failure() -> Failure {
    Failure {
        code: FailureCode::Compute,
        blames: Side::PhaseB,
        message: Text::truncated("out of memory"),
    }
}

pub fn hello_parts(rank: u32) -> HelloParts {
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
        chunks: Some(100),
        host: Text::truncated("host-a"),
        device: None,
        device_given: None,
        kernels: Text::truncated("cpu"),
        kernels_digest: 9,
    }
}

pub fn hello(rank: u32) -> Hello {
    Hello::new(hello_parts(rank)).expect("a rank of the world")
}

pub fn fault() -> Fault {
    let rank = Rank::new(1);
    Fault::new(FaultKind::PeerDied, rank, "receive", "socket closed")
}

/// A stamp of a call of its own.
pub fn fresh(chunk: u64, epoch: u64) -> Stamp {
    Stamp::fresh(ChunkIndex::new(chunk), CacheEpoch::new(epoch))
}

/// The stamp of the answer to a call.
pub fn echo(call: u64, chunk: u64, epoch: u64) -> Stamp {
    Stamp {
        call: CallStamp::Echo(CallId::new(call)),
        ..fresh(chunk, epoch)
    }
}

/// One frame of each kind, as the first message of an edge.
pub fn first_frames() -> Vec<(&'static str, Vec<u8>)> {
    let mut composer = Composer::new();
    let mut frames = Vec::new();
    let mut keep = |name, committed: Committed<'_>| frames.push((name, committed.frame().to_vec()));
    for (name, bare) in [("noop", Bare::Noop), ("shutdown", Bare::Shutdown)] {
        let prepared = composer.prepare_bare(bare);
        keep(name, prepared.commit(&mut Sequencer::new(), fresh(0, 0)));
    }
    let prepared = composer.prepare_envelope(&envelope()).expect("it fits");
    keep(
        "envelope",
        prepared.commit(&mut Sequencer::new(), fresh(0, 0)),
    );
    let prepared = composer.prepare_outcome(&outcome()).expect("it fits");
    keep(
        "result",
        prepared.commit(&mut Sequencer::new(), echo(0, 0, 0)),
    );
    let prepared = composer.prepare_failure(&failure()).expect("it fits");
    keep(
        "failure",
        prepared.commit(&mut Sequencer::new(), fresh(0, 0)),
    );
    frames
}

/// A receiver for which the frames of [`first_frames`] are in order.
pub enum Receiver {
    Requests(Lockstep<Requests>),
    Replies(Lockstep<Replies>),
}

impl Receiver {
    pub fn of(name: &str) -> Self {
        if name != "result" {
            return Self::Requests(Lockstep::requests());
        }
        let mut replies = Lockstep::replies();
        let mut composer = Composer::new();
        let prepared = composer.prepare_envelope(&envelope()).expect("it fits");
        let call = prepared.commit(&mut Sequencer::new(), fresh(0, 0));
        replies.expect(call.header());
        Self::Replies(replies)
    }

    pub fn admit<'a>(&mut self, frame: &'a [u8]) -> Result<Matched<'a>, LockstepError> {
        match self {
            Self::Requests(lockstep) => lockstep.admit(frame),
            Self::Replies(lockstep) => lockstep.admit(frame),
        }
    }
}

/// The frame with `change` made to its 60 checked bytes and its body, and checksums that fit: what
/// a peer sends that is wrong on purpose.
pub fn forge(frame: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut forged = frame.to_vec();
    change(&mut forged);
    let body_crc = crc32(&forged[64..]);
    forged[52..56].copy_from_slice(&body_crc.to_le_bytes());
    let header_crc = crc32(&forged[..60]);
    forged[60..64].copy_from_slice(&header_crc.to_le_bytes());
    forged
}

/// CRC-32 as in IEEE 802.3, bit by bit: an oracle apart from the crate that is tested.
pub fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    })
}
