//! What must hold, one function each; every one panics when it does not.

use pp_kernels::denoise::reference::{self, Chunk};
use pp_kernels::denoise::{cpu::add_gaussian, settings};
use pp_kernels::{Chroma, ChunkShape, Layout, SessionConfig, VideoPlanParts};

use crate::device::{Gpu, Pad, Session};

/// A case; `true` asks for the smallest sizes.
pub type Case = fn(&Gpu, bool);

/// What needs no more of a device than that encode, decode and zero steps work: the fake driver does those, too.
pub const ALL: &[(&str, Case)] = &[
    ("layout_is_that_of_the_cpu", layout_is_that_of_the_cpu),
    (
        "encode_gives_the_bytes_of_the_cpu",
        encode_gives_the_bytes_of_the_cpu,
    ),
    (
        "decode_gives_the_samples_of_the_cpu",
        decode_gives_the_samples_of_the_cpu,
    ),
    ("zero_steps_is_the_identity", zero_steps_is_the_identity),
    ("rows_may_have_a_stride", rows_may_have_a_stride),
    ("phase_b_equals_the_oracle", phase_b_equals_the_oracle),
    ("phase_b_equals_the_cpu", phase_b_equals_the_cpu),
    ("a_film_is_that_of_the_cpu", a_film_is_that_of_the_cpu),
    (
        "the_cache_is_what_the_plan_says",
        the_cache_is_what_the_plan_says,
    ),
    ("chunks_of_one_frame_remember", chunks_of_one_frame_remember),
    ("conditioning_is_held", conditioning_is_held),
    (
        "the_same_calls_give_the_same_bytes",
        the_same_calls_give_the_same_bytes,
    ),
    (
        "bad_calls_leave_the_session_usable",
        bad_calls_leave_the_session_usable,
    ),
];

const SIGMA: f32 = 20.0;

/// A picture with a gradient, an edge and a fine texture, moving by one sample a frame; noisy, seeded.
fn noisy(width: usize, height: usize, frame: u64) -> Vec<u8> {
    let at = |index: usize| {
        let (x, y) = (index % width + frame as usize, index / width);
        let edge = if x % 40 > 25 { 70 } else { 0 };
        let texture = if x % 40 < 12 { (x % 3) * 12 } else { 0 };
        (40 + x % 40 + y % 90 + edge + texture) as u8
    };
    let mut samples: Vec<u8> = (0..width * height).map(at).collect();
    add_gaussian(&mut samples, SIGMA, 11, frame, 0);
    samples
}

/// A frame of all planes of the session.
fn picture(config: &SessionConfig, frame: u64) -> Vec<u8> {
    (0..config.chroma.planes())
        .flat_map(|index| {
            let (width, height) = config.chroma.plane_size(index, config.width, config.height);
            noisy(width as usize, height as usize, frame + 100 * index as u64)
        })
        .collect()
}

fn known_noise(config: SessionConfig) -> SessionConfig {
    SessionConfig {
        noise_sigma: Some(SIGMA),
        threads: 0,
        ..config
    }
}

fn layout_of(
    session: &mut Session<'_>,
    frames: usize,
    plan: &VideoPlanParts,
    context: u32,
) -> Layout {
    session.layout(ChunkShape {
        frames: frames as u32,
        steps: plan.num_denoise_steps,
        context_frames: if plan.do_kv_recompute { context } else { 0 },
    })
}

const CONTEXT: u32 = settings::CONTEXT_FRAMES as u32;

/// Encodes and runs Phase B in one session.
fn run(session: &mut Session<'_>, frames: &[Vec<u8>], plan: &VideoPlanParts) -> Vec<u8> {
    let layout = layout_of(session, frames.len(), plan, CONTEXT);
    let input = session.encode(frames, plan, &layout);
    session.phase_b(plan, &layout, &input)
}

fn values(tokens: &[u8]) -> impl Iterator<Item = f64> + '_ {
    tokens
        .chunks_exact(2)
        .map(|two| f32::from_bits(u32::from(u16::from_le_bytes([two[0], two[1]])) << 16).into())
}

/// One plane out of the tokens of a frame, row-major, with its padding.
fn plane(tokens: &[u8], width: usize, height: usize) -> Vec<f64> {
    let all: Vec<f64> = values(tokens).collect();
    let sample = |index: usize| {
        let (x, y) = (index % width, index / width);
        all[(y / 8 * (width / 8) + x / 8) * 64 + y % 8 * 8 + x % 8]
    };
    (0..width * height).map(sample).collect()
}

/// The largest error of these kernels at a sample of this value; derived in `kernels/README.md`.
fn tolerance(value: f64, steps: u32) -> f64 {
    let first = value / 256.0 + 0.035 * f64::from(SIGMA);
    first + if steps > 1 { 1.25 } else { 0.0 }
}

/// The largest difference from the CPU's result, which is off by its own tolerance (`tests/denoiser.rs`), too. Noise
/// that is estimated on a few hundred samples may come out half as large again.
fn tolerance_to_cpu(value: f64, steps: u32) -> f64 {
    let cpu = value / 256.0 + 0.1 * f64::from(steps);
    tolerance(value, steps) + 0.035 * 0.5 * f64::from(SIGMA) + cpu
}

/// Fails with the worst sample, and says how close the worst one came.
fn assert_close(found: &[f64], expected: &[f64], limit: impl Fn(f64) -> f64, what: &str) -> f64 {
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

fn sizes(small: bool) -> &'static [(u32, u32)] {
    if small {
        &[(16, 16), (37, 23)]
    } else {
        &[
            (16, 16),
            (17, 16),
            (16, 19),
            (37, 23),
            (64, 48),
            (129, 71),
            (320, 180),
        ]
    }
}

fn layout_is_that_of_the_cpu(gpu: &Gpu, small: bool) {
    for &(width, height) in sizes(small) {
        for chroma in Chroma::ALL {
            let config = gpu.config(width, height, chroma, 5);
            let (mut ours, mut cpu) = (Session::gpu(gpu, config), Session::cpu(config));
            for (frames, steps, context_frames) in [(1, 0, 0), (5, 2, 0), (3, 4, 1), (2, 1, 2)] {
                let shape = ChunkShape {
                    frames,
                    steps,
                    context_frames,
                };
                assert_eq!(ours.layout(shape), cpu.layout(shape));
            }
        }
    }
}

fn encode_gives_the_bytes_of_the_cpu(gpu: &Gpu, small: bool) {
    for &(width, height) in sizes(small) {
        for chroma in Chroma::ALL {
            // The noise is estimated: on the host, by the same code.
            let config = gpu.config(width, height, chroma, 3);
            let (mut ours, mut cpu) = (Session::gpu(gpu, config), Session::cpu(config));
            let mut plan = VideoPlanParts::first(width, height, 5);
            // One frame of history, then two, then a recompute from both; then from chunks of several frames.
            for (start, count, context) in [(0, 1, 0), (1, 1, 1), (2, 1, 2), (3, 3, 2), (6, 2, 2)] {
                if start > 0 {
                    plan = plan.following(start, context > 0);
                }
                let frames: Vec<_> = (start..start + count)
                    .map(|t| picture(&config, t))
                    .collect();
                let layout = layout_of(&mut ours, frames.len(), &plan, context);
                let what = format!("{width}x{height} {chroma:?}, frame {start}");
                let found = ours.encode(&frames, &plan, &layout);
                let expected = cpu.encode(&frames, &plan, &layout);
                for (_, tensor) in layout.inputs.iter() {
                    let range = layout.inputs.range(tensor.name()).expect("a tensor");
                    let same = found[range.clone()] == expected[range];
                    assert!(same, "{what}: {} differs", tensor.name());
                }
            }
        }
    }
}

fn decode_gives_the_samples_of_the_cpu(gpu: &Gpu, small: bool) {
    // Every bf16 there is, NaN, infinities and numbers below zero among them.
    let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for &(width, height) in sizes(small) {
        for chroma in Chroma::ALL {
            let config = gpu.config(width, height, chroma, 3);
            let (mut ours, mut cpu) = (Session::gpu(gpu, config), Session::cpu(config));
            let plan = VideoPlanParts::first(width, height, 1);
            let layout = layout_of(&mut ours, 3, &plan, 0);
            let bytes = layout.outputs.payload_bytes() as usize;
            let output: Vec<u8> = every.iter().copied().cycle().take(bytes).collect();
            let found = ours.decode(&plan, &layout, &output);
            let expected = cpu.decode(&plan, &layout, &output);
            for (frame, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let at = found.iter().zip(expected).position(|(a, b)| a != b);
                if let Some(at) = at {
                    panic!(
                        "{width}x{height} {chroma:?}, frame {frame}: sample {at} is {}, must be {}",
                        found[at], expected[at]
                    );
                }
            }
        }
    }
}

fn zero_steps_is_the_identity(gpu: &Gpu, small: bool) {
    for &(width, height) in sizes(small) {
        for chroma in Chroma::ALL {
            let config = gpu.config(width, height, chroma, 4);
            let mut session = Session::gpu(gpu, config);
            let plan = VideoPlanParts::first(width, height, 0);
            for count in [1, 4] {
                let mut frames: Vec<_> = (0..count).map(|t| picture(&config, t)).collect();
                // Every value of a sample occurs.
                for (value, sample) in frames[0].iter_mut().enumerate() {
                    *sample = value as u8;
                }
                let layout = layout_of(&mut session, frames.len(), &plan, 0);
                let input = session.encode(&frames, &plan, &layout);
                let output = session.phase_b(&plan, &layout, &input);
                assert!(
                    input[..output.len()] == output,
                    "{width}x{height} {chroma:?}"
                );
                let decoded = session.decode(&plan, &layout, &output);
                assert!(
                    decoded == frames,
                    "{width}x{height} {chroma:?} comes back changed"
                );
            }
        }
    }
}

fn rows_may_have_a_stride(gpu: &Gpu, small: bool) {
    for &(width, height) in sizes(small) {
        for (chroma, pad) in [(Chroma::Mono, 1), (Chroma::C420, 3), (Chroma::C444, 64)] {
            let config = gpu.config(width, height, chroma, 3);
            let mut session = Session::gpu(gpu, config);
            let plan = VideoPlanParts::first(width, height, 0);
            let frames: Vec<_> = (0..3).map(|t| picture(&config, t)).collect();
            let layout = layout_of(&mut session, 3, &plan, 0);
            let input = session.encode_from(Pad(pad), &frames, &plan, &layout);
            let packed = session.encode(&frames, &plan, &layout);
            assert!(input == packed, "{width}x{height} {chroma:?}");
            let output = session.phase_b(&plan, &layout, &input);
            let decoded = session.decode_to(Pad(pad), &plan, &layout, &output);
            assert!(
                decoded == frames,
                "{width}x{height} {chroma:?} comes back changed"
            );
        }
    }
}

fn phase_b_equals_the_oracle(gpu: &Gpu, small: bool) {
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
        let frames: Vec<_> = (0..6).map(|t| noisy(width, height, t)).collect();
        let mut session = Session::gpu(gpu, known_noise(gpu.config(w, h, Chroma::Mono, 4)));
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
                .map(|f| plane(f, pw, ph))
                .collect()
        };
        // The oracle's input comes from the CPU's tokens, read by this file's own code.
        let mut tokens = Session::cpu(known_noise(gpu.config(w, h, Chroma::Mono, 4)));
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

fn phase_b_equals_the_cpu(gpu: &Gpu, small: bool) {
    // Kernels for one, two and four frames at once, the last of them with places left over.
    let counts: &[u64] = if small { &[1, 3] } else { &[1, 2, 3, 4, 5] };
    for &(width, height) in sizes(small) {
        for chroma in Chroma::ALL {
            for &count in counts {
                compare_with_cpu(gpu, (width, height), chroma, count);
            }
        }
    }
}

/// Two steps on both; the noise is estimated, and so differs from plane to plane.
fn compare_with_cpu(gpu: &Gpu, (width, height): (u32, u32), chroma: Chroma, count: u64) {
    let config = gpu.config(width, height, chroma, count as u32);
    let (mut ours, mut cpu) = (Session::gpu(gpu, config), Session::cpu(config));
    let plan = VideoPlanParts::first(width, height, 2);
    let frames: Vec<_> = (0..count).map(|t| picture(&config, t)).collect();
    let found: Vec<_> = values(&run(&mut ours, &frames, &plan)).collect();
    let expected: Vec<_> = values(&run(&mut cpu, &frames, &plan)).collect();
    let what = format!("{width}x{height} {chroma:?}, {count} frames");
    let limit = |value| tolerance_to_cpu(value, 2);
    assert_close(&found, &expected, limit, &what);
}

/// What is left of the difference in 8 bits, over enough samples to count shares.
fn a_film_is_that_of_the_cpu(gpu: &Gpu, small: bool) {
    let (width, height, count) = if small { (96, 64, 2) } else { (1280, 720, 8) };
    let config = gpu.config(width, height, Chroma::C420, count as u32);
    let plan = VideoPlanParts::first(width, height, 2);
    let frames: Vec<_> = (0..count).map(|t| picture(&config, t)).collect();
    let film = |mut session: Session<'_>| {
        let output = run(&mut session, &frames, &plan);
        let layout = layout_of(&mut session, frames.len(), &plan, 0);
        session.decode(&plan, &layout, &output).concat()
    };
    let (found, expected) = (film(Session::gpu(gpu, config)), film(Session::cpu(config)));
    let apart = |by: std::ops::RangeInclusive<u8>| {
        let pairs = found.iter().zip(&expected);
        pairs.filter(|(a, b)| by.contains(&a.abs_diff(**b))).count() as f64 / found.len() as f64
    };
    let (by_one, by_more) = (apart(1..=1), apart(2..=255));
    println!(
        "       {:.3} % differ by one step, {:.4} % by more",
        100.0 * by_one,
        100.0 * by_more
    );
    assert!(
        by_one <= 0.04 && by_more <= 0.0001,
        "{by_one} by one step, {by_more} by more"
    );
}

fn the_cache_is_what_the_plan_says(gpu: &Gpu, small: bool) {
    let (width, height) = if small { (24, 16) } else { (72, 40) };
    let config = known_noise(gpu.config(width, height, Chroma::C420, 3));
    let frames: Vec<_> = (0..6).map(|t| picture(&config, t)).collect();
    let first = VideoPlanParts::first(width, height, 2);
    let second = first.following(3, false);
    let after_first = |plan: VideoPlanParts| {
        let mut session = Session::gpu(gpu, config);
        run(&mut session, &frames[..3], &first);
        run(&mut session, &frames[3..], &plan)
    };
    let kept = after_first(second);
    let alone = run(&mut Session::gpu(gpu, config), &frames[3..], &first);
    assert!(kept != alone, "the frames of the first chunk must count");
    assert!(
        after_first(first.following(3, true)) == kept,
        "a recompute gives what the cache held"
    );
    // A chunk of no steps is remembered like any other.
    let mut session = Session::gpu(gpu, config);
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
    let scaled = VideoPlanParts {
        noise_scale: 1.5,
        ..second
    };
    assert!(after_first(scaled) != kept, "the strength counts");
    let far = second.following(30, false);
    assert!(after_first(far) == alone, "far frames do not count");

    // After a reset the context of the epoch before must not come back.
    let mut session = Session::gpu(gpu, config);
    run(&mut session, &frames[..3], &first);
    run(&mut session, &frames[3..4], &reset);
    let continued = run(&mut session, &frames[4..], &first.following(4, false));
    let mut other = Session::gpu(gpu, config);
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

fn chunks_of_one_frame_remember(gpu: &Gpu, _: bool) {
    let config = known_noise(gpu.config(24, 24, Chroma::C422, 1));
    let frames: Vec<_> = (0..5).map(|t| picture(&config, t)).collect();
    let outputs = [false, true].map(|recompute| {
        let mut session = Session::gpu(gpu, config);
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

fn conditioning_is_held(gpu: &Gpu, _: bool) {
    let config = known_noise(gpu.config(40, 24, Chroma::Mono, 2));
    let frames: Vec<_> = (0..2).map(|t| picture(&config, t)).collect();
    let first = VideoPlanParts::first(40, 24, 1);
    let after_change = |reset_crossattn_cache| {
        let mut session = Session::gpu(gpu, config);
        let layout = layout_of(&mut session, 2, &first, 0);
        let mut input = session.encode(&frames, &first, &layout);
        session.phase_b(&first, &layout, &input);
        let (offset, _) = layout.inputs.get("conditioning_embeds").expect("a tensor");
        input[offset as usize..][..2].copy_from_slice(&[0x20, 0x41]); // 10.0
        let plan = VideoPlanParts {
            reset_kv_cache: true,
            reset_crossattn_cache,
            ..first.following(2, false)
        };
        session.phase_b(&plan, &layout, &input)
    };
    let unchanged = run(&mut Session::gpu(gpu, config), &frames, &first);
    assert!(
        after_change(false) == unchanged,
        "it is held without a reset"
    );
    assert!(
        after_change(true) != unchanged,
        "it is read again after a reset"
    );
}

fn the_same_calls_give_the_same_bytes(gpu: &Gpu, small: bool) {
    let (width, height) = if small { (40, 24) } else { (320, 180) };
    let config = known_noise(gpu.config(width, height, Chroma::C420, 8));
    let frames: Vec<_> = (0..8).map(|t| picture(&config, t)).collect();
    let plan = VideoPlanParts::first(width, height, 2);
    let once = run(&mut Session::gpu(gpu, config), &frames, &plan);
    for _ in 0..3 {
        let again = run(&mut Session::gpu(gpu, config), &frames, &plan);
        assert!(again == once);
    }
}

fn bad_calls_leave_the_session_usable(gpu: &Gpu, _: bool) {
    let config = known_noise(gpu.config(40, 24, Chroma::Mono, 2));
    let frames: Vec<_> = (0..2).map(|t| picture(&config, t)).collect();
    let plan = VideoPlanParts::first(40, 24, 1);
    let mut session = Session::gpu(gpu, config);
    let before = run(&mut session, &frames, &plan);
    let Session::Gpu(_, raw) = &mut session else {
        unreachable!("made above")
    };
    let empty = pp_kernels::Manifest::empty();
    let nothing = || pp_kernels::Payload::on_device(&empty, 0, 0).expect("no tensors fit anywhere");
    let mut no_output =
        pp_kernels::PayloadMut::on_device(&empty, 0, 0).expect("no tensors fit anywhere");
    // SAFETY: the context is current, and there is no memory to keep.
    let error = unsafe { raw.phase_b(&plan, &nothing(), &mut no_output) };
    let error = error.expect_err("there is no latents_in").to_string();
    assert!(error.contains("latents_in holds 0 frames"), "{error}");
    // SAFETY: as above.
    let error = unsafe { raw.phase_b(&plan.following(2, true), &nothing(), &mut no_output) };
    error.expect_err("there are no context_frames either");
    assert!(run(&mut session, &frames, &plan) == before);
}
