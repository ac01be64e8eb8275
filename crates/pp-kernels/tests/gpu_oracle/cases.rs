//! What must hold, one function each; every one panics when it does not.

use pp_kernels::check::{CHECKS, Subject};
use pp_kernels::{Bits, Chroma, ChunkShape, VideoPlanParts};

use crate::device::{Gpu, Kernels, Pad, Session, kernels};
use crate::either::{
    self, SIGMA, assert_close, film, known_noise, layout_of, picture, run, tolerance_of_cpu,
    tolerance_of_gpu, values,
};

/// A case; `true` asks for the smallest sizes.
pub(crate) type Case = fn(&Gpu, bool);

/// What needs no more of a device than that encode, decode and zero steps work: the fake driver does those, too.
pub(crate) const ALL: &[(&str, Case)] = &[
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
    ("phase_b_equals_the_oracle", |gpu, small| {
        either::phase_b_equals_the_oracle(Kernels::Gpu(gpu), Bits::Eight, small);
    }),
    ("phase_b_equals_the_cpu", phase_b_equals_the_cpu),
    ("a_film_is_that_of_the_cpu", a_film_is_that_of_the_cpu),
    ("the_cache_is_what_the_plan_says", |gpu, small| {
        either::the_cache_is_what_the_plan_says(Kernels::Gpu(gpu), small);
    }),
    ("chunks_of_one_frame_remember", |gpu, _| {
        either::chunks_of_one_frame_remember(Kernels::Gpu(gpu));
    }),
    ("conditioning_is_held", |gpu, _| {
        either::conditioning_is_held(Kernels::Gpu(gpu));
    }),
    ("groups_equal_one_member", groups_equal_one_member),
    ("parts_equal_one_call", |gpu, small| {
        either::parts_equal_one_call(Kernels::Gpu(gpu), small);
    }),
    (
        "the_same_calls_give_the_same_bytes",
        the_same_calls_give_the_same_bytes,
    ),
    (
        "bad_calls_leave_the_session_usable",
        bad_calls_leave_the_session_usable,
    ),
];

/// With the sizes of `pp plugin check`: a stream for each member, and copies through the host.
fn groups_equal_one_member(gpu: &Gpu, _: bool) {
    let (context, stream) = gpu.handles();
    let set = kernels();
    // SAFETY: context and stream are those of `gpu`, which outlives the subject; the context is current.
    let subject = unsafe { Subject::on_device(&set, context, stream) }.expect("a subject");
    let checks = CHECKS.iter().filter(|check| check.name().contains("group"));
    assert_eq!(checks.clone().count(), 1);
    for check in checks {
        check.run(&subject).expect("groups give the same bytes");
    }
}

/// The largest difference from the CPU's result, which is off by its own tolerance, too. Noise that is estimated on a
/// few hundred samples may come out half as large again.
fn tolerance_to_cpu(value: f64, steps: u32) -> f64 {
    let estimate = 0.035 * 0.5 * f64::from(SIGMA);
    tolerance_of_gpu(value, steps) + estimate + tolerance_of_cpu(value, steps)
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
                assert_eq!(ours.layout(shape, 0), cpu.layout(shape, 0));
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
            for (start, count, context, pad) in [
                (0, 1, 0, 0),
                (1, 1, 1, 1),
                (2, 1, 2, 3),
                (3, 3, 2, 64),
                (6, 2, 2, 5),
            ] {
                if start > 0 {
                    plan = plan.following(start, context > 0);
                }
                let frames: Vec<_> = (start..start + count)
                    .map(|t| picture(&config, t))
                    .collect();
                let layout = layout_of(&mut ours, frames.len(), &plan, context);
                let what = format!("{width}x{height} {chroma:?}, frame {start}");
                let found = ours.encode_from(Pad(pad), &frames, &plan, &layout);
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
            for (count, pad) in [(3, 0), (1, 1), (2, 64)] {
                let layout = layout_of(&mut ours, count, &plan, 0);
                let bytes = layout.outputs.payload_bytes() as usize;
                let output: Vec<u8> = every.iter().copied().cycle().take(bytes).collect();
                let found = ours.decode_to(Pad(pad), &plan, &layout, &output);
                let expected = cpu.decode(&plan, &layout, &output);
                for (frame, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let at = found.iter().zip(expected).position(|(a, b)| a != b);
                    if let Some(at) = at {
                        panic!(
                            "{width}x{height} {chroma:?}, {pad} bytes behind each row, frame {frame}: sample {at} is {}, must \
                             be {}",
                            found[at], expected[at]
                        );
                    }
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
    let found: Vec<_> = values(&run(&mut ours, &frames, &plan), Bits::Eight).collect();
    let expected: Vec<_> = values(&run(&mut cpu, &frames, &plan), Bits::Eight).collect();
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
    let film = |mut session: Session<'_>| film(&mut session, &frames, &plan).concat();
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
    let Session::Gpu(_, [_, raw, _]) = &mut session else {
        unreachable!("made above")
    };
    let empty = pp_kernels::Manifest::empty();
    let nothing = || pp_kernels::Payload::on_device(&empty, 0, 0).expect("no tensors fit anywhere");
    let mut no_output =
        pp_kernels::PayloadMut::on_device(&empty, 0, 0).expect("no tensors fit anywhere");
    // SAFETY: the context is current, and there is no memory to keep.
    let error = unsafe { raw.run(&plan, 0, &nothing(), &mut no_output, None) };
    let error = error.expect_err("there is no latents_in").to_string();
    assert!(error.contains("latents_in holds 0 frames"), "{error}");
    // SAFETY: as above.
    let error = unsafe {
        raw.run(
            &plan.following(2, true),
            0,
            &nothing(),
            &mut no_output,
            None,
        )
    };
    error.expect_err("there are no context_frames either");
    assert!(run(&mut session, &frames, &plan) == before);
}
