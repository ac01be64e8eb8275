//! Any bytes: no decoder panics, none allocates over its bound. Any value: it survives the wire.

use pp_contract::*;
use pp_testing::Toy;
use proptest::prelude::*;

use crate::support::decoders::{Counting, allocated};
use crate::support::*;

#[global_allocator]
static COUNTING: Counting = Counting;

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..400)
}

/// A good frame with a few of its bytes replaced, cut or grown at the end.
fn damaged(good: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    let end = prop_oneof![Just(0isize), -9isize..9];
    (prop::sample::select(good), damage, end).prop_map(|(mut frame, damage, end)| {
        for (at, byte) in damage {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        frame.resize(frame.len().saturating_add_signed(end), 0);
        frame
    })
}

fn frames() -> Vec<Vec<u8>> {
    first_frames()
        .into_iter()
        .map(|(.., frame)| frame)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_bytes_are_decoded_within_the_bound(bytes in bytes()) {
        decoders::frame(&bytes);
        decoders::hello(&bytes);
        decoders::fault(&bytes);
    }

    #[test]
    fn damaged_frames_are_decoded_within_the_bound(bytes in damaged(frames())) {
        decoders::frame(&bytes);
    }

    #[test]
    fn damaged_hellos_are_decoded_within_the_bound(
        bytes in damaged(vec![hello(0).encode().unwrap()])
    ) {
        decoders::hello(&bytes);
    }

    #[test]
    fn damaged_faults_are_decoded_within_the_bound(
        bytes in damaged(vec![fault().encode().unwrap()])
    ) {
        decoders::fault(&bytes);
    }

    #[test]
    fn any_valid_message_survives_the_wire(
        (steps, recompute) in (0..20u32, any::<bool>()),
        (height, width) in (1..=65536u32, 1..=65536u32),
        (start, seed) in (1u64 << 32.., any::<u64>()),
        gaps in any::<[u32; 9]>().prop_map(|gaps| gaps.map(|gap| gap / 9)),
        flags in any::<[bool; 3]>(),
        (bias, noise) in (-1e30f32..1e30, 0f32..1e30),
        dims in prop::collection::vec(0..60u64, 0..6),
        embeds in 0..5000u64,
        ids in any::<(u64, u64, u64, u16)>(),
        times in any::<(u64, u64)>(),
        seal in any::<Option<(u64, u64)>>(),
        note in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let plan = VideoPlan::new(VideoPlanParts {
            height,
            width,
            current_start_frame: start,
            do_kv_recompute: recompute,
            num_denoise_steps: steps,
            expected_generator_calls: steps + u32::from(recompute),
            init_cache: flags[0],
            reset_kv_cache: flags[1],
            reset_crossattn_cache: flags[2],
            base_seed: seed,
            kv_cache_attention_bias: bias,
            noise_scale: noise,
            skipped_frames: gaps[0],
            context_skipped: core::array::from_fn(|at| gaps[at + 1]),
        }).unwrap();
        let mut tensors = vec![
            tensor("latents_in", DType::Bf16, &dims),
            tensor("conditioning_embeds", DType::Bf16, &[embeds]),
            tensor("denoising_step_list", DType::I64, &[steps.into()]),
        ];
        if recompute {
            tensors.push(tensor("context_frames", DType::Bf16, &dims));
        }
        let mut inputs = Manifest::new(&tensors).unwrap();
        let mut outputs = Manifest::new(&[tensor("latents_out", DType::Bf16, &dims)]).unwrap();
        if seal.is_some() {
            inputs = inputs.sealed().unwrap();
            outputs = outputs.sealed().unwrap();
        }
        let message = Message::new(plan, &pipeline().stages()[0], inputs).unwrap();
        let message = message.with_note(note).unwrap();
        let report = |calls| StageReport {
            calls,
            start_frame: start,
            work_us: times.0,
            idle_us: times.1,
            seal: seal.map(|(digest, cost_us)| Seal { digest, cost_us }),
        };
        let calls = report(steps + u32::from(recompute));
        let handed_on = message.clone().hand_on(pipeline(), (1, 0), outputs, &calls).unwrap();
        let accepted = handed_on.clone().accepted(pipeline(), &report(1), Vec::new()).unwrap();
        let stamp = Stamp {
            attempt: ids.3,
            ..Stamp::new(ChunkIndex::new(ids.0), CacheEpoch::new(ids.1), CallId::new(ids.2))
        };
        for (maker, message) in [message, handed_on, accepted].iter().enumerate() {
            let frame = frame_of(message, stamp);
            let matched = admit(&frame).unwrap();
            prop_assert_eq!(Stamp::of(matched.header()), stamp);
            prop_assert_eq!(&matched.message(pipeline(), maker).unwrap(), message);
        }
    }

    #[test]
    fn tensors_of_a_manifest_are_aligned_and_do_not_overlap(
        sizes in prop::collection::vec(0..2000u64, 0..MAX_TENSORS)
    ) {
        let name = |at| format!("t{at}");
        let spec = |(at, size): (usize, &u64)| tensor(&name(at), DType::U8, &[*size]);
        let tensors: Vec<TensorSpec> = sizes.iter().enumerate().map(spec).collect();
        let manifest = Manifest::new(&tensors).unwrap();
        let mut end = 0;
        for (at, size) in sizes.iter().enumerate() {
            let offset = manifest.offset(at).unwrap();
            prop_assert_eq!(offset % TENSOR_ALIGN_BYTES, 0);
            prop_assert!((end..end + TENSOR_ALIGN_BYTES).contains(&offset));
            end = offset + size;
            let range = manifest.range(&name(at)).unwrap();
            prop_assert_eq!(range, offset as usize..end as usize);
        }
        prop_assert_eq!(manifest.payload_bytes(), end);
    }
}

#[test]
fn composing_allocates_nothing_once_the_buffer_has_grown() {
    let messages = [message(), handed_on(), accepted()];
    let mut composer = Composer::new();
    let mut sequencer = Sequencer::new();
    let (bytes, ()) = allocated(|| {
        for n in 0..1000 {
            for message in &messages {
                let prepared = composer.prepare(message).unwrap();
                let _ = prepared.commit(&mut sequencer, stamp(n));
            }
            let prepared = composer.prepare_bare(Bare::Noop);
            let _ = prepared.commit(&mut sequencer, stamp(n));
        }
    });
    assert_eq!(bytes, 0);
}

#[test]
fn message_of_a_chunk_like_the_last_allocates_nothing() {
    let source = &pipeline().stages()[0];
    for (inputs, outputs) in [
        (inputs(), outputs()),
        (inputs().sealed().unwrap(), outputs().sealed().unwrap()),
    ] {
        let mut parts = plan_parts();
        let mut on_its_way = Some(handed_on());
        let (bytes, ()) = allocated(|| {
            for frame in 16..1016 {
                parts.current_start_frame = frame;
                let plan = VideoPlan::new(parts).unwrap();
                let message = Message::new(plan, source, inputs.clone()).unwrap();
                let _ = message.overtaken();
                // One lap more.
                let message = on_its_way.take().unwrap();
                let message = message.hand_on(pipeline(), (1, 0), outputs.clone(), &report(5));
                on_its_way = message.ok();
            }
        });
        assert_eq!(bytes, 0);
    }
}

#[test]
fn admitting_allocates_nothing() {
    let frame = first_frame("message");
    let mut lockstep = Lockstep::new();
    let (bytes, admitted) = allocated(|| lockstep.admit(&frame).is_ok());
    assert!(admitted);
    assert_eq!(bytes, 0);
}

#[test]
fn largest_message_is_decoded_within_the_bound() {
    let specs: Vec<_> = (0..MAX_TENSORS - 1)
        .map(|n| tensor(&format!("{n:048}"), DType::U8, &[1; MAX_DIMS]))
        .collect();
    let tensors = Manifest::new(&specs).unwrap().sealed().unwrap();
    // As many reports as a trail can have, each as long as it can be.
    let stages = vec!["b@0"; pipeline::MAX_STAGES - 3].join(",");
    let ranks: Vec<_> = (0..pipeline::MAX_RANKS).map(|r| r.to_string()).collect();
    let long = parse(&format!("a@0,{stages},b@{},c@0", ranks.join("+")));
    let seal = Seal {
        digest: u64::MAX,
        cost_us: u64::MAX,
    };
    let largest = StageReport {
        calls: u32::MAX,
        start_frame: u64::MAX,
        work_us: u64::MAX,
        idle_us: u64::MAX,
        seal: Some(seal),
    };
    let plan = Toy(plan_parts());
    let message = Message::new(plan, &long.stages()[0], tensors.clone()).unwrap();
    let mut message = message.with_note(vec![0xff; MAX_NOTE_BYTES]).unwrap();
    for at in 1..long.stages().len() {
        message = message
            .hand_on(&long, (at, 0), tensors.clone(), &largest)
            .unwrap();
        for _ in &long.stages()[at].ranks[1..] {
            message = message.joined(&largest);
        }
    }
    decoders::frame(&frame_of(&message, stamp(0)));
}
