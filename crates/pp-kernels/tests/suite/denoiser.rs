//! The CPU backend against the oracle, and what its plan's fields do.

use pp_kernels::denoise::cpu::estimate_sigma;
use pp_kernels::{
    Bits, Chroma, ChunkShape, FrameGeometry, FrameView, KernelError, KernelSet, PayloadMut,
    PlaneView, SessionConfig, VideoPlanParts,
};

use crate::device::{Kernels, Session};
use crate::either::{self, SIGMA, clean, film, known_noise, noisy, picture};

#[test]
fn cpu_equals_the_oracle_over_two_chunks() {
    either::phase_b_equals_the_oracle(Kernels::Cpu, Bits::Eight, false);
}

#[test]
fn cpu_equals_the_oracle_in_10_bits() {
    either::phase_b_equals_the_oracle(Kernels::Cpu, Bits::Ten, false);
}

#[test]
fn the_cache_is_what_the_plan_says() {
    either::the_cache_is_what_the_plan_says(Kernels::Cpu, false);
}

#[test]
fn conditioning_is_read_when_the_plan_says_so() {
    either::conditioning_is_held(Kernels::Cpu);
}

#[test]
fn chunks_of_one_frame_remember_across_chunks() {
    either::chunks_of_one_frame_remember(Kernels::Cpu);
}

#[test]
fn parts_equal_one_call() {
    either::parts_equal_one_call(Kernels::Cpu, false);
}

#[test]
fn more_parts_than_passes_are_refused() {
    let config = SessionConfig {
        part: 2,
        parts: 3,
        ..SessionConfig::host(40, 24, Chroma::Mono, 4)
    };
    let open = |config| KernelSet::for_host().open_stage("phase_b", config, &[]);
    let mut session = open(&config).unwrap();
    let mut shape = ChunkShape {
        frames: 1,
        steps: 3,
        context_frames: 0,
    };
    assert_eq!(session.layout(shape, 0).unwrap().outputs.len(), 1);
    shape.steps = 2;
    let error = session.layout(shape, 0).unwrap_err().to_string();
    let words = "2 denoise steps cannot be cut into 3 parts, at most 2";
    assert!(error.contains(words), "{error}");
    let past = SessionConfig { part: 3, ..config };
    let error = open(&past).unwrap_err().to_string();
    assert!(error.contains("part 3 of 3"), "{error}");
}

#[test]
fn planes_are_denoised_each_on_its_own() {
    let (width, height) = (37, 35);
    for chroma in [Chroma::C420, Chroma::C422, Chroma::C444] {
        let config = known_noise(SessionConfig::host(width, height, chroma, 4));
        let frames = [0, 1].map(|t| picture(&config, t));
        let plan = VideoPlanParts::first(width, height, 2);
        let decoded = film(&mut Session::cpu(config), &frames, &plan);

        let mut from = 0;
        for index in 0..3 {
            let (w, h) = chroma.plane_size(index, width, height);
            let alone = known_noise(SessionConfig::host(w, h, Chroma::Mono, 4));
            let size = (w * h) as usize;
            let frames = frames.each_ref().map(|f| f[from..from + size].to_vec());
            let plan = VideoPlanParts::first(w, h, 2);
            let expected = film(&mut Session::cpu(alone), &frames, &plan);
            for (found, expected) in decoded.iter().zip(&expected) {
                assert_eq!(
                    &found[from..from + size],
                    expected,
                    "plane {index} of {chroma:?}"
                );
            }
            from += size;
        }
    }
}

#[test]
fn noise_is_removed_and_its_strength_is_estimated() {
    let (width, height) = (96, 80);
    let frames: Vec<_> = (0..4).map(|t| noisy(width, height, t)).collect();
    let view = PlaneView::new(&frames[0], width, width, height).unwrap();
    let estimate = estimate_sigma(view);
    assert!(
        (estimate - SIGMA).abs() < 0.1 * SIGMA,
        "estimated {estimate}"
    );

    let (w, h) = (width as u32, height as u32);
    let config = known_noise(SessionConfig::host(w, h, Chroma::Mono, 4));
    let plan = VideoPlanParts::first(w, h, 2);
    let decoded = film(&mut Session::cpu(config), &frames, &plan);
    let error = |frames: &[Vec<u8>]| -> f64 {
        let squares = frames.iter().enumerate().flat_map(|(t, frame)| {
            let clean = clean(width, height, t as u64);
            frame
                .iter()
                .zip(clean)
                .map(|(a, b)| f64::from(a.abs_diff(b)).powi(2))
                .collect::<Vec<_>>()
        });
        squares.sum()
    };
    let gain = 10.0 * (error(&frames) / error(&decoded)).log10();
    assert!(gain > 5.0, "{gain} dB");
}

#[test]
fn a_clean_flat_picture_stays_as_it_is() {
    let frames = vec![vec![77; 40 * 24]; 2];
    let mut session = Session::cpu(SessionConfig::host(40, 24, Chroma::Mono, 4));
    let plan = VideoPlanParts::first(40, 24, 2);
    assert_eq!(film(&mut session, &frames, &plan), frames);
}

#[test]
fn arguments_that_do_not_fit_the_session_never_reach_the_kernels() {
    let config = SessionConfig::host(40, 24, Chroma::C420, 4);
    let mut session = KernelSet::for_host()
        .open_stage("encode", &config, &[])
        .unwrap();
    let plan = VideoPlanParts::first(40, 24, 1);
    let shape = ChunkShape {
        frames: 1,
        steps: 1,
        context_frames: 0,
    };
    let layout = session.layout(shape, 0).unwrap();
    let mut input = vec![0; layout.outputs.payload_bytes() as usize];
    let of = FrameGeometry::of(&config);
    let of_mono = FrameGeometry {
        chroma: Chroma::Mono,
        ..of
    };
    let of_ten = FrameGeometry {
        bits: Bits::Ten,
        ..of
    };
    let pixels = vec![0; of_ten.frame_bytes()];
    let frame = FrameView::packed(&pixels[..of.frame_bytes()], &of).unwrap();
    let mono = FrameView::packed(&pixels[..40 * 24], &of_mono).unwrap();
    let ten = FrameView::packed(&pixels, &of_ten).unwrap();
    let cases: [(&[FrameView<'_>], VideoPlanParts, &str); 6] = [
        (
            &[ten],
            plan,
            "plane 0 of frame 0 has 10 bits a sample, must have 8",
        ),
        (&[], plan, "0 frames in a chunk, the session takes 1 to 4"),
        (&[frame; 5], plan, "5 frames in a chunk"),
        (&[mono], plan, "plane 1 of frame 0 is 0x0, must be 20x12"),
        (
            &[frame],
            VideoPlanParts { width: 48, ..plan },
            "the plan is for 48x24, the session for 40x24",
        ),
        (
            &[frame],
            VideoPlanParts {
                expected_generator_calls: 3,
                ..plan
            },
            "1 steps without recompute take 1",
        ),
    ];
    for (frames, plan, reason) in cases {
        let mut payload = PayloadMut::new(&layout.outputs, &mut input).unwrap();
        match session.encode(frames, &plan, &mut payload) {
            Err(KernelError::BadCall {
                operation,
                reason: found,
            }) => {
                assert_eq!(operation, "encode");
                assert!(found.contains(reason), "{found}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(
        PayloadMut::new(&layout.outputs, &mut input[1..]).is_err(),
        "a slot that is too short"
    );
}
