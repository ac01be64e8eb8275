//! The CPU backend against the oracle, and what its plan's fields do.

use pp_kernels::denoise::reference::{self, Chunk};
use pp_kernels::denoise::{
    cpu::{add_gaussian, estimate_sigma},
    settings,
};
use pp_kernels::{
    Chroma, ChunkShape, DType, FrameView, FrameViewMut, KernelError, KernelSession, KernelSet,
    Layout, Payload, PayloadMut, PlaneView, SessionConfig, VideoPlanParts,
};

const SIGMA: f32 = 20.0;

/// A picture with a gradient, an edge and a fine texture, moving by one sample a frame; noisy, seeded.
fn noisy(width: usize, height: usize, frame: u64) -> Vec<u8> {
    let mut samples = clean(width, height, frame);
    add_gaussian(&mut samples, SIGMA, 11, frame, 0);
    samples
}

fn clean(width: usize, height: usize, frame: u64) -> Vec<u8> {
    let at = |index: usize| {
        let (x, y) = (index % width + frame as usize, index / width);
        let edge = if x % 40 > 25 { 70 } else { 0 };
        let texture = if x % 40 < 12 { (x % 3) * 12 } else { 0 };
        (40 + x % 40 + y + edge + texture) as u8
    };
    (0..width * height).map(at).collect()
}

struct Stream {
    session: KernelSession,
    config: SessionConfig,
}

impl Stream {
    fn new(width: u32, height: u32, chroma: Chroma) -> Stream {
        let config = SessionConfig {
            noise_sigma: Some(SIGMA),
            threads: 2,
            ..SessionConfig::host(width, height, chroma, 4)
        };
        Stream {
            session: KernelSet::for_host().open(&config).unwrap(),
            config,
        }
    }

    fn layout(&mut self, frames: usize, plan: &VideoPlanParts) -> Layout {
        let context_frames = if plan.do_kv_recompute {
            settings::CONTEXT_FRAMES as u32
        } else {
            0
        };
        let shape = ChunkShape {
            frames: frames as u32,
            steps: plan.num_denoise_steps,
            context_frames,
        };
        self.session.layout(shape).unwrap()
    }

    /// The payload that goes to Phase B.
    fn encode(&mut self, frames: &[Vec<u8>], plan: &VideoPlanParts) -> Vec<u8> {
        let layout = self.layout(frames.len(), plan);
        let config = self.config;
        let views: Vec<_> = frames
            .iter()
            .map(|f| FrameView::packed(f, config.width, config.height, config.chroma).unwrap())
            .collect();
        let mut input = vec![0xAA; layout.inputs.payload_bytes() as usize];
        self.session
            .encode(
                &views,
                plan,
                &mut PayloadMut::new(&layout.inputs, &mut input).unwrap(),
            )
            .unwrap();
        input
    }

    fn phase_b(&mut self, frames: usize, plan: &VideoPlanParts, input: &[u8]) -> Vec<u8> {
        let layout = self.layout(frames, plan);
        let mut output = vec![0xAA; layout.outputs.payload_bytes() as usize];
        let calls = self
            .session
            .phase_b(
                plan,
                &Payload::new(&layout.inputs, input).unwrap(),
                &mut PayloadMut::new(&layout.outputs, &mut output).unwrap(),
            )
            .unwrap();
        assert_eq!(calls, plan.expected_generator_calls);
        output
    }

    fn run(&mut self, frames: &[Vec<u8>], plan: &VideoPlanParts) -> Vec<u8> {
        let input = self.encode(frames, plan);
        self.phase_b(frames.len(), plan, &input)
    }

    fn decode(&mut self, frames: usize, plan: &VideoPlanParts, output: &[u8]) -> Vec<Vec<u8>> {
        let layout = self.layout(frames, plan);
        let config = self.config;
        let mut decoded = vec![
            vec![
                0;
                config
                    .chroma
                    .packed_frame_bytes(config.width, config.height)
            ];
            frames
        ];
        let mut views: Vec<_> = decoded
            .iter_mut()
            .map(|f| FrameViewMut::packed(f, config.width, config.height, config.chroma).unwrap())
            .collect();
        self.session
            .decode(
                plan,
                &Payload::new(&layout.outputs, output).unwrap(),
                &mut views,
            )
            .unwrap();
        decoded
    }
}

fn bf16(two: &[u8]) -> f64 {
    f32::from_bits(u32::from(u16::from_le_bytes([two[0], two[1]])) << 16).into()
}

/// One plane out of the tokens of a frame, row-major.
fn plane(tokens: &[u8], first_token: usize, width: usize, height: usize) -> Vec<f64> {
    let sample = |index: usize| {
        let (x, y) = (index % width, index / width);
        let token = first_token + y / 8 * (width / 8) + x / 8;
        bf16(&tokens[2 * (token * 64 + y % 8 * 8 + x % 8)..])
    };
    (0..width * height).map(sample).collect()
}

/// The largest error of the f32 backend that the formats allow, at a sample of this value.
///
/// bf16 rounds to 8 bits: half a unit is 2^-9 of the value's power of two, at most 2^-8 of the value. Before that,
/// sums of 64 squares are off by at most 64 · 2^-24 of themselves; the weights that matter have distances up to 30
/// logits (a floor of 14, and e^-16 more), so logits are off by 30 · 64 · 2^-24 = 1.2e-4, weights by as much
/// relatively, and a mean of samples in 0..=255 by at most twice that times 255, 0.06. Sums over 181 offsets and four
/// patches add 724 · 2^-24 · 255 = 0.011. The second pass has guides that are off by half of that, which its logits
/// feel to first order like another such error: 0.1 for each pass.
fn tolerance(value: f64, steps: u32) -> f64 {
    value / 256.0 + 0.1 * f64::from(steps)
}

fn assert_close(found: &[f64], expected: &[f64], steps: u32, what: &str) {
    for (index, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!(
            (a - b).abs() <= tolerance(*b, steps),
            "{what}: sample {index} is {a}, must be {b}"
        );
    }
}

#[test]
fn cpu_equals_the_oracle_over_two_chunks() {
    let cases = [
        // width, height, steps, noise_scale, bias, recompute
        (61, 45, 1, 1.0, 0.0, false),
        (29, 21, 2, 1.0, 0.0, false),
        (24, 40, 2, 0.5, -0.7, true),
        (140, 16, 1, 0.6, 1.3, true),
    ];
    for (width, height, steps, noise_scale, bias, recompute) in cases {
        let what = format!(
            "{width}x{height}, {steps} steps, scale {noise_scale}, bias {bias}, recompute {recompute}"
        );
        let frames: Vec<_> = (0..6).map(|t| noisy(width, height, t)).collect();
        let mut stream = Stream::new(width as u32, height as u32, Chroma::Mono);
        let first = VideoPlanParts {
            noise_scale,
            kv_cache_attention_bias: bias,
            ..VideoPlanParts::first(width as u32, height as u32, steps)
        };
        let second = first.following(4, recompute);
        let outputs = [
            stream.run(&frames[..4], &first),
            stream.run(&frames[4..], &second),
        ];

        // The oracle's input comes from tokens that a zero-step session made, read by this file's own code.
        let (padded_width, padded_height) = (width.next_multiple_of(8), height.next_multiple_of(8));
        let frame_bytes = padded_width * padded_height * 2;
        let read = |tokens: &[u8]| -> Vec<Vec<f64>> {
            tokens
                .chunks_exact(frame_bytes)
                .map(|f| plane(f, 0, padded_width, padded_height))
                .collect()
        };
        let mut tokens = Stream::new(width as u32, height as u32, Chroma::Mono);
        let identity = VideoPlanParts::first(width as u32, height as u32, 0);
        let mut inputs = read(&tokens.run(&frames[..4], &identity));
        inputs.extend(read(&tokens.run(&frames[4..], &identity)));

        let strengths: Vec<_> = settings::schedule(steps)
            .map(|step| step as f64 / 1000.0)
            .collect();
        let chunk = Chunk {
            width: padded_width,
            height: padded_height,
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
        for (number, (output, expected)) in outputs.iter().zip(&expected).enumerate() {
            for (found, expected) in read(output).iter().zip(expected) {
                assert_close(found, expected, steps, &format!("{what}, chunk {number}"));
            }
        }
    }
}

#[test]
fn planes_are_denoised_each_on_its_own() {
    for chroma in [Chroma::C420, Chroma::C422, Chroma::C444] {
        let (width, height) = (37, 35);
        let mut colour = Stream::new(width, height, chroma);
        let (cw, ch) = chroma.plane_size(1, width, height);
        let frame = |t: u64| {
            let mut frame = noisy(width as usize, height as usize, t);
            frame.extend(noisy(cw as usize, ch as usize, t + 100));
            frame.extend(noisy(cw as usize, ch as usize, t + 200));
            frame
        };
        let plan = VideoPlanParts::first(width, height, 2);
        let output = colour.run(&[frame(0), frame(1)], &plan);
        let decoded = colour.decode(2, &plan, &output);

        let mut from = 0;
        for (index, offset) in [0, 100, 200].into_iter().enumerate() {
            let (w, h) = chroma.plane_size(index, width, height);
            let mut alone = Stream::new(w, h, Chroma::Mono);
            let plan = VideoPlanParts::first(w, h, 2);
            let frames = [0, 1].map(|t| noisy(w as usize, h as usize, t + offset));
            let output = alone.run(&frames, &plan);
            let expected = alone.decode(2, &plan, &output);
            let size = (w * h) as usize;
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
fn the_cache_is_what_the_plan_says() {
    let (width, height) = (40, 24);
    let frames: Vec<_> = (0..6)
        .map(|t| noisy(width as usize, height as usize, t))
        .collect();
    let first = VideoPlanParts::first(width, height, 1);
    let second = first.following(3, false);
    let run = |plan: VideoPlanParts| {
        let mut stream = Stream::new(width, height, Chroma::Mono);
        stream.run(&frames[..3], &first);
        stream.run(&frames[3..], &plan)
    };
    let kept = run(second);
    let alone = Stream::new(width, height, Chroma::Mono).run(&frames[3..], &first);
    assert_ne!(kept, alone, "the frames of the first chunk must count");

    assert_eq!(
        run(first.following(3, true)),
        kept,
        "a recompute gives what the cache held"
    );
    assert_eq!(
        run(VideoPlanParts {
            reset_kv_cache: true,
            ..second
        }),
        alone,
        "a reset forgets"
    );
    assert_eq!(
        run(VideoPlanParts {
            init_cache: true,
            ..second
        }),
        alone,
        "a new beginning forgets"
    );
    assert_ne!(
        run(VideoPlanParts {
            kv_cache_attention_bias: -1.0,
            ..second
        }),
        kept,
        "the bias counts"
    );
    assert_eq!(
        run(VideoPlanParts {
            kv_cache_attention_bias: -80.0,
            ..second
        }),
        alone,
        "a bias can shut the cache out"
    );
    assert_ne!(
        run(VideoPlanParts {
            noise_scale: 1.5,
            ..second
        }),
        kept,
        "the strength counts"
    );
    // Frames further away than the window in time are not looked at.
    assert_eq!(
        run(second.following(30, false)),
        alone,
        "far frames do not count"
    );
}

#[test]
fn conditioning_is_read_when_the_plan_says_so() {
    let (width, height) = (40, 24);
    let frames: Vec<_> = (0..2)
        .map(|t| noisy(width as usize, height as usize, t))
        .collect();
    let plan = VideoPlanParts::first(width, height, 1);
    let later = plan.following(2, false);
    let run = |plan: VideoPlanParts| {
        let mut stream = Stream::new(width, height, Chroma::Mono);
        let input = stream.encode(&frames, &VideoPlanParts::first(width, height, 1));
        stream.phase_b(2, &VideoPlanParts::first(width, height, 1), &input);
        let layout = stream.layout(2, &plan);
        let mut changed = stream.encode(&frames, &plan);
        let (offset, spec) = layout.inputs.get("conditioning_embeds").unwrap();
        assert_eq!((spec.dtype(), spec.shape().dims()), (DType::Bf16, &[1][..]));
        changed[offset as usize..][..2].copy_from_slice(&[0x20, 0x41]); // 10.0
        (
            stream.phase_b(2, &plan, &input),
            stream.phase_b(
                2,
                &VideoPlanParts {
                    reset_kv_cache: true,
                    ..plan
                },
                &changed,
            ),
        )
    };
    let (_, held) = run(later);
    let (_, reread) = run(VideoPlanParts {
        reset_crossattn_cache: true,
        ..later
    });
    assert_ne!(held, reread);
    let (fresh, _) = run(VideoPlanParts {
        reset_kv_cache: true,
        ..later
    });
    assert_eq!(
        fresh, held,
        "without a reset the new conditioning is not looked at"
    );
}

#[test]
fn chunks_of_one_frame_remember_across_chunks() {
    let (width, height) = (24, 24);
    let frames: Vec<_> = (0..4)
        .map(|t| noisy(width as usize, height as usize, t))
        .collect();
    let outputs = [false, true].map(|recompute| {
        let mut stream = Stream::new(width, height, Chroma::Mono);
        let first = VideoPlanParts::first(width, height, 1);
        let mut all = Vec::new();
        for (t, frame) in frames.iter().enumerate() {
            // Two frames of context are known from the third chunk on.
            let plan = if t == 0 {
                first
            } else {
                first.following(t as u64, recompute && t >= 2)
            };
            all.push(stream.run(std::slice::from_ref(frame), &plan));
        }
        all
    });
    assert_eq!(outputs[0], outputs[1]);
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

    let mut stream = Stream::new(width as u32, height as u32, Chroma::Mono);
    let plan = VideoPlanParts::first(width as u32, height as u32, 2);
    let output = stream.run(&frames, &plan);
    let decoded = stream.decode(4, &plan, &output);
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
    let config = SessionConfig {
        noise_sigma: None,
        ..SessionConfig::host(40, 24, Chroma::Mono, 4)
    };
    let mut stream = Stream {
        session: KernelSet::for_host().open(&config).unwrap(),
        config,
    };
    let plan = VideoPlanParts::first(40, 24, 2);
    let output = stream.run(&frames, &plan);
    assert_eq!(stream.decode(2, &plan, &output), frames);
}

#[test]
fn arguments_that_do_not_fit_the_session_never_reach_the_kernels() {
    let mut stream = Stream::new(40, 24, Chroma::C420);
    let plan = VideoPlanParts::first(40, 24, 1);
    let layout = stream.layout(1, &plan);
    let mut input = vec![0; layout.inputs.payload_bytes() as usize];
    let pixels = vec![0; Chroma::C420.packed_frame_bytes(40, 24)];
    let frame = FrameView::packed(&pixels, 40, 24, Chroma::C420).unwrap();
    let mono = FrameView::packed(&pixels[..40 * 24], 40, 24, Chroma::Mono).unwrap();
    let cases: [(&[FrameView<'_>], VideoPlanParts, &str); 5] = [
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
        let mut payload = PayloadMut::new(&layout.inputs, &mut input).unwrap();
        match stream.session.encode(frames, &plan, &mut payload) {
            Err(KernelError::BadCall {
                operation: "encode",
                reason: found,
            }) => {
                assert!(found.contains(reason), "{found}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(
        PayloadMut::new(&layout.inputs, &mut input[1..]).is_err(),
        "a slot that is too short"
    );
}
