//! What must hold of the kernels of the CPU and of those of a GPU, one function each; every one panics when it does not.

use half::f16;
use pp_kernels::denoise::reference::{self, Chunk};
use pp_kernels::denoise::{cpu::add_gaussian, settings};
use pp_kernels::{Bits, Chroma, ChunkShape, DType, Layout, SessionConfig, VideoPlanParts};

use crate::device::{Kernels, Session};

pub(crate) const SIGMA: f32 = 20.0;

/// A picture with a gradient, an edge and a fine texture, moving by one sample a frame.
pub(crate) fn clean(width: usize, height: usize, frame: u64) -> Vec<u8> {
    let at = |index: usize| {
        let (x, y) = (index % width + frame as usize, index / width);
        let edge = if x % 40 > 25 { 70 } else { 0 };
        let texture = if x % 40 < 12 { (x % 3) * 12 } else { 0 };
        (40 + x % 40 + y % 90 + edge + texture) as u8
    };
    (0..width * height).map(at).collect()
}

/// The same with seeded noise.
pub(crate) fn noisy(width: usize, height: usize, frame: u64) -> Vec<u8> {
    let mut samples = clean(width, height, frame);
    add_gaussian(&mut samples, SIGMA, 11, frame, 0);
    samples
}

/// A frame of all planes of the session.
pub(crate) fn picture(config: &SessionConfig, frame: u64) -> Vec<u8> {
    (0..config.chroma.planes())
        .flat_map(|index| {
            let (width, height) = config.chroma.plane_size(index, config.width, config.height);
            noisy(width as usize, height as usize, frame + 100 * index as u64)
        })
        .collect()
}

pub(crate) fn known_noise(config: SessionConfig) -> SessionConfig {
    SessionConfig {
        noise_sigma: Some(SIGMA),
        threads: 0,
        ..config
    }
}

pub(crate) fn layout_of(
    session: &mut Session<'_>,
    frames: usize,
    plan: &VideoPlanParts,
    context: u32,
) -> Layout {
    layout_in_lap(session, frames, plan, context, 0)
}

fn layout_in_lap(
    session: &mut Session<'_>,
    frames: usize,
    plan: &VideoPlanParts,
    context: u32,
    lap: u32,
) -> Layout {
    let shape = ChunkShape {
        frames: frames as u32,
        steps: plan.num_denoise_steps,
        context_frames: if plan.do_kv_recompute { context } else { 0 },
    };
    session.layout(shape, lap)
}

const CONTEXT: u32 = settings::CONTEXT_FRAMES as u32;

/// Encodes and runs `phase_b` in one session.
pub(crate) fn run(session: &mut Session<'_>, frames: &[Vec<u8>], plan: &VideoPlanParts) -> Vec<u8> {
    let layout = layout_of(session, frames.len(), plan, CONTEXT);
    let input = session.encode(frames, plan, &layout);
    session.phase_b(plan, &layout, &input)
}

/// The frames that come back.
pub(crate) fn film(
    session: &mut Session<'_>,
    frames: &[Vec<u8>],
    plan: &VideoPlanParts,
) -> Vec<Vec<u8>> {
    let output = run(session, frames, plan);
    let layout = layout_of(session, frames.len(), plan, CONTEXT);
    session.decode(plan, &layout, &output)
}

pub(crate) fn values(tokens: &[u8], bits: Bits) -> impl Iterator<Item = f64> + '_ {
    let words = tokens.chunks_exact(2);
    let words = words.map(|two| u16::from_le_bytes([two[0], two[1]]));
    words.map(move |word| match bits {
        Bits::Eight => f32::from_bits(u32::from(word) << 16).into(),
        Bits::Ten => f16::from_bits(word).into(),
    })
}

/// The same picture in so many bits, with what 8 bits do not hold.
fn in_bits(samples: Vec<u8>, bits: Bits) -> Vec<u8> {
    match bits {
        Bits::Eight => samples,
        Bits::Ten => samples
            .iter()
            .enumerate()
            .flat_map(|(at, sample)| (u16::from(*sample) * 4 + at as u16 % 4).to_le_bytes())
            .collect(),
    }
}

/// One plane out of the tokens of a frame, row-major, with its padding.
fn plane(tokens: &[u8], bits: Bits, (width, height): (usize, usize)) -> Vec<f64> {
    let all: Vec<f64> = values(tokens, bits).collect();
    let sample = |index: usize| {
        let (x, y) = (index % width, index / width);
        all[(y / 8 * (width / 8) + x / 8) * 64 + y % 8 * 8 + x % 8]
    };
    (0..width * height).map(sample).collect()
}

/// The largest error of the f32 backend on the CPU that the formats allow, at a sample of this value.
///
/// bf16 rounds to 8 bits: half a unit is 2^-9 of the value's power of two, at most 2^-8 of the value. Before that,
/// sums of 64 squares are off by at most 64 · 2^-24 of themselves; the weights that matter have distances up to 30
/// logits (a floor of 14, and e^-16 more), so logits are off by 30 · 64 · 2^-24 = 1.2e-4, weights by as much
/// relatively, and a mean of samples in 0..=255 by at most twice that times 255, 0.06. Sums over 181 offsets and four
/// patches add 724 · 2^-24 · 255 = 0.011. The second pass has guides that are off by half of that, which its logits
/// feel to first order like another such error: 0.1 for each pass.
pub(crate) fn tolerance_of_cpu(value: f64, steps: u32) -> f64 {
    value / 256.0 + 0.1 * f64::from(steps)
}

/// The largest error of the CUDA kernels at a sample of this value; derived in `kernels/README.md`.
pub(crate) fn tolerance_of_gpu(value: f64, steps: u32) -> f64 {
    let first = value / 256.0 + 0.035 * f64::from(SIGMA);
    first + if steps > 1 { 1.25 } else { 0.0 }
}

/// Fails with the worst sample, and says how close the worst one came.
pub(crate) fn assert_close(
    found: &[f64],
    expected: &[f64],
    limit: impl Fn(f64) -> f64,
    what: &str,
) -> f64 {
    assert_eq!(found.len(), expected.len());
    let mut worst = (0.0, 0);
    for (index, (a, b)) in found.iter().zip(expected).enumerate() {
        let share = (a - b).abs() / limit(*b);
        // A NaN is worse than anything.
        if share.is_nan() || share > worst.0 {
            worst = (share, index);
        }
        if share.is_nan() {
            break;
        }
    }
    let (share, at) = worst;
    assert!(
        share <= 1.0,
        "{what}: sample {at} is {}, must be {} ± {}",
        found[at],
        expected[at],
        limit(expected[at])
    );
    share
}

pub(crate) fn phase_b_equals_the_oracle(kernels: Kernels<'_>, bits: Bits, small: bool) {
    let tolerance = match kernels {
        // f16 has three bits more than bf16.
        Kernels::Cpu if bits == Bits::Ten => |value, steps| tolerance_of_cpu(value / 8.0, steps),
        Kernels::Cpu => tolerance_of_cpu,
        Kernels::Gpu(_) => tolerance_of_gpu,
    };
    let cases: &[(usize, usize, u32, f32, f32, bool)] = &[
        // width, height, steps, noise_scale, bias, recompute
        (29, 21, 2, 1.0, 0.0, false),
        (24, 40, 2, 0.5, -0.7, true),
        (61, 45, 1, 1.0, 0.0, false),
        (140, 16, 1, 0.6, 1.3, true),
        (72, 67, 3, 1.0, 0.0, true),
    ];
    for &(width, height, steps, noise_scale, bias, recompute) in
        &cases[..if small { 2 } else { cases.len() }]
    {
        let what = format!(
            "{width}x{height}, {steps} steps, scale {noise_scale}, bias {bias}, recompute {recompute}"
        );
        let (w, h) = (width as u32, height as u32);
        let frames: Vec<_> = (0..6)
            .map(|t| in_bits(noisy(width, height, t), bits))
            .collect();
        let config = SessionConfig {
            bits,
            ..known_noise(kernels.config(w, h, Chroma::Mono, 4))
        };
        let mut session = kernels.open(config);
        let first = VideoPlanParts {
            noise_scale,
            kv_cache_attention_bias: bias,
            ..VideoPlanParts::first(w, h, steps)
        };
        let outputs = [
            run(&mut session, &frames[..4], &first),
            run(&mut session, &frames[4..], &first.following(4, recompute)),
        ];
        let (pw, ph) = (width.next_multiple_of(8), height.next_multiple_of(8));
        let read = |tokens: &[u8]| -> Vec<Vec<f64>> {
            tokens
                .chunks_exact(pw * ph * 2)
                .map(|f| plane(f, bits, (pw, ph)))
                .collect()
        };
        // The oracle's input comes from the CPU's tokens, read by this file's own code.
        let mut tokens = Kernels::Cpu.open(config);
        let identity = VideoPlanParts::first(w, h, 0);
        let mut inputs = read(&run(&mut tokens, &frames[..4], &identity));
        inputs.extend(read(&run(&mut tokens, &frames[4..], &identity)));
        let strengths: Vec<_> = settings::schedule(steps)
            .map(|step| step as f64 / 1000.0)
            .collect();
        let chunk = Chunk {
            width: pw,
            height: ph,
            context: &[],
            frames: &inputs[..4],
            sigma: SIGMA.into(),
            noise_scale: noise_scale.into(),
            bias: bias.into(),
            strengths: &strengths,
        };
        let expected = [
            reference::denoise(&chunk),
            reference::denoise(&Chunk {
                context: &inputs[2..4],
                frames: &inputs[4..],
                ..chunk
            }),
        ];
        let mut worst = 0.0f64;
        for (number, (output, expected)) in outputs.iter().zip(&expected).enumerate() {
            for (t, (found, expected)) in read(output).iter().zip(expected).enumerate() {
                let what = format!("{what}, chunk {number}, frame {t}");
                let limit = |value| tolerance(value, steps);
                worst = worst.max(assert_close(found, expected, limit, &what));
            }
        }
        println!("       {what}: {:.0} % of the tolerance", 100.0 * worst);
    }
}

pub(crate) fn the_cache_is_what_the_plan_says(kernels: Kernels<'_>, small: bool) {
    let (width, height) = if small { (24, 16) } else { (72, 40) };
    let config = known_noise(kernels.config(width, height, Chroma::C420, 3));
    let frames: Vec<_> = (0..6).map(|t| picture(&config, t)).collect();
    let first = VideoPlanParts::first(width, height, 2);
    let second = first.following(3, false);
    let after_first = |plan: VideoPlanParts| {
        let mut session = kernels.open(config);
        run(&mut session, &frames[..3], &first);
        run(&mut session, &frames[3..], &plan)
    };
    let kept = after_first(second);
    let alone = run(&mut kernels.open(config), &frames[3..], &first);
    assert!(kept != alone, "the frames of the first chunk must count");
    assert!(
        after_first(first.following(3, true)) == kept,
        "a recompute gives what the cache held"
    );
    // A chunk of no steps is remembered like any other.
    let mut session = kernels.open(config);
    run(
        &mut session,
        &frames[..3],
        &VideoPlanParts::first(width, height, 0),
    );
    assert!(
        run(&mut session, &frames[3..], &second) == kept,
        "zero steps remember what two steps do"
    );
    let reset = VideoPlanParts {
        reset_kv_cache: true,
        ..second
    };
    assert!(after_first(reset) == alone, "a reset forgets");
    let fresh = VideoPlanParts {
        init_cache: true,
        ..second
    };
    assert!(after_first(fresh) == alone, "a new beginning forgets");
    let biased = |bias| VideoPlanParts {
        kv_cache_attention_bias: bias,
        ..second
    };
    assert!(after_first(biased(-1.0)) != kept, "the bias counts");
    // A GPU need not give the same bits here.
    let shuts_out = matches!(kernels, Kernels::Gpu(_)) || after_first(biased(-80.0)) == alone;
    assert!(shuts_out, "a bias can shut the cache out");
    let scaled = VideoPlanParts {
        noise_scale: 1.5,
        ..second
    };
    assert!(after_first(scaled) != kept, "the strength counts");
    let far = second.following(30, false);
    assert!(after_first(far) == alone, "far frames do not count");

    // After a reset the context of the epoch before must not come back.
    let mut session = kernels.open(config);
    run(&mut session, &frames[..3], &first);
    run(&mut session, &frames[3..4], &reset);
    let continued = run(&mut session, &frames[4..], &first.following(4, false));
    let mut other = kernels.open(config);
    let begin = VideoPlanParts {
        current_start_frame: 3,
        ..first
    };
    run(&mut other, &frames[3..4], &begin);
    let expected = run(&mut other, &frames[4..], &first.following(4, false));
    assert!(
        continued == expected,
        "one frame is all the context there is after the reset"
    );
}

pub(crate) fn chunks_of_one_frame_remember(kernels: Kernels<'_>) {
    let config = known_noise(kernels.config(24, 24, Chroma::C422, 1));
    let frames: Vec<_> = (0..5).map(|t| picture(&config, t)).collect();
    let outputs = [false, true].map(|recompute| {
        let mut session = kernels.open(config);
        let first = VideoPlanParts::first(24, 24, 1);
        let mut all = Vec::new();
        for (t, frame) in frames.iter().enumerate() {
            // Two frames of context are known from the third chunk on.
            let plan = match t {
                0 => first,
                t => first.following(t as u64, recompute && t >= 2),
            };
            all.push(run(&mut session, std::slice::from_ref(frame), &plan));
        }
        all
    });
    assert!(outputs[0] == outputs[1]);
}

/// A film with everything that changes what is remembered: cuts, gaps, recomputes, chunks of other lengths and of no pass.
fn plans(first: VideoPlanParts) -> Vec<(u64, VideoPlanParts)> {
    let cut = |start| VideoPlanParts {
        reset_kv_cache: true,
        ..first.following(start, false)
    };
    let louder = VideoPlanParts {
        noise_scale: 1.3,
        kv_cache_attention_bias: -0.4,
        ..first.following(8, false)
    };
    let last = first.following(15, false);
    let behind_gap = last.behind(3, 1, false);
    vec![
        (3, first),
        (3, first.following(3, false)),
        (2, first.following(6, true)),
        (1, louder),
        (2, cut(9)),
        (3, first.following(11, true)),
        (
            1,
            VideoPlanParts {
                reset_crossattn_cache: true,
                ..cut(14)
            },
        ),
        (3, last),
        (1, behind_gap),
        (1, behind_gap.behind(1, 1, true)),
    ]
}

/// Each plan's chunk through sessions of all parts, in laps, each of which is opened anew in front of chunk `anew`.
fn through_parts(
    kernels: Kernels<'_>,
    config: SessionConfig,
    [parts, laps]: [u32; 2],
    plans: &[(u64, VideoPlanParts)],
    anew: Option<usize>,
) -> Vec<Vec<u8>> {
    let part = |part| SessionConfig {
        part,
        parts,
        laps,
        ..config
    };
    let open = |parts: std::ops::Range<u32>| parts.map(|at| kernels.open(part(at)));
    let mut front = kernels.open(config);
    let mut sessions: Vec<_> = open(0..parts).collect();
    let mut outputs = Vec::new();
    for (chunk, (count, plan)) in plans.iter().enumerate() {
        let mut plan = *plan;
        if anew == Some(chunk) {
            // What a restart sends: the frames before the chunk, and a plan that begins with them.
            sessions = open(0..parts).collect();
            plan.init_cache = true;
        }
        let start = plan.current_start_frame;
        let frames: Vec<_> = (start..start + count)
            .map(|t| picture(&config, t))
            .collect();
        let layout = layout_of(&mut front, frames.len(), &plan, CONTEXT);
        // A beginning would forget the frames that the context is made of.
        let encoded = VideoPlanParts {
            init_cache: chunk == 0,
            ..plan
        };
        let mut travels = front.encode(&frames, &encoded, &layout);
        let mut tensors = layout.inputs.clone();
        for step in 0..laps * parts {
            let (lap, session) = (step / parts, &mut sessions[(step % parts) as usize]);
            let own = layout_in_lap(session, frames.len(), &plan, CONTEXT, lap);
            assert_eq!(
                own.inputs, tensors,
                "each part gets what the one before it gives"
            );
            travels = session.phase_b_in_lap(&plan, lap, &own, &travels);
            for ((at, spec), next) in own.outputs.iter().zip(
                (own.outputs.iter().skip(1).map(|(at, _)| at)).chain([own.outputs.payload_bytes()]),
            ) {
                travels[(at + spec.bytes()) as usize..next as usize].fill(0);
            }
            tensors = own.outputs;
        }
        assert_eq!(tensors, layout.outputs);
        outputs.push(travels);
    }
    outputs
}

pub(crate) fn parts_equal_one_call(kernels: Kernels<'_>, small: bool) {
    let (width, height) = if small { (24, 16) } else { (72, 40) };
    let config = known_noise(kernels.config(width, height, Chroma::C420, 3));
    for steps in if small { 3..=3 } else { 1..=5 } {
        let plans = plans(VideoPlanParts::first(width, height, steps));
        let whole = through_parts(kernels, config, [1, 1], &plans, None);
        // What one session does with the same calls, without this file's help.
        let mut session = kernels.open(config);
        for ((count, plan), expected) in plans.iter().zip(&whole) {
            let start = plan.current_start_frame;
            let frames: Vec<_> = (start..start + count)
                .map(|t| picture(&config, t))
                .collect();
            assert!(run(&mut session, &frames, plan) == *expected);
        }
        for parts in 2..=steps.min(4) {
            let found = through_parts(kernels, config, [parts, 1], &plans, None);
            for (chunk, (found, expected)) in found.iter().zip(&whole).enumerate() {
                assert!(
                    found == expected,
                    "{steps} steps in {parts} parts: chunk {chunk} differs"
                );
            }
            // A chain that begins anew with context is the chain that was not disturbed.
            for anew in [2, 5, 9] {
                let found = through_parts(kernels, config, [parts, 1], &plans, Some(anew));
                assert!(found == whole, "{parts} parts, anew at chunk {anew}");
            }
        }
    }
    // In a ring: a whole stage that a chunk passes twice, and two parts that it passes twice.
    let plans = plans(VideoPlanParts::first(width, height, 4));
    let whole = through_parts(kernels, config, [1, 1], &plans, None);
    for ring in [[1, 2], [2, 2]] {
        for anew in [None, Some(2)] {
            let found = through_parts(kernels, config, ring, &plans, anew);
            assert!(found == whole, "{ring:?} parts and laps, anew at {anew:?}");
        }
    }
    let mut one = kernels.open(config);
    let identity = VideoPlanParts::first(width, height, 0);
    let frames = [picture(&config, 0)];
    let layout = layout_of(&mut one, 1, &identity, 0);
    let input = one.encode(&frames, &identity, &layout);
    let output = one.phase_b(&identity, &layout, &input);
    assert!(input[..output.len()] == output, "no pass is the identity");
}

pub(crate) fn conditioning_is_held(kernels: Kernels<'_>) {
    let config = known_noise(kernels.config(40, 24, Chroma::Mono, 2));
    let frames: Vec<_> = (0..2).map(|t| picture(&config, t)).collect();
    let first = VideoPlanParts::first(40, 24, 1);
    let after_change = |reset_crossattn_cache| {
        let mut session = kernels.open(config);
        let layout = layout_of(&mut session, 2, &first, 0);
        let mut input = session.encode(&frames, &first, &layout);
        session.phase_b(&first, &layout, &input);
        let (offset, spec) = layout.inputs.get("conditioning_embeds").expect("a tensor");
        assert_eq!((spec.dtype(), spec.shape().dims()), (DType::Bf16, &[1][..]));
        input[offset as usize..][..2].copy_from_slice(&[0x20, 0x41]); // 10.0
        let plan = VideoPlanParts {
            reset_kv_cache: true,
            reset_crossattn_cache,
            ..first.following(2, false)
        };
        session.phase_b(&plan, &layout, &input)
    };
    let unchanged = run(&mut kernels.open(config), &frames, &first);
    assert!(
        after_change(false) == unchanged,
        "it is held without a reset"
    );
    assert!(
        after_change(true) != unchanged,
        "it is read again after a reset"
    );
}
