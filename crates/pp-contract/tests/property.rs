//! Any bytes: no decoder panics, none allocates over its bound. Any value: it survives the wire.

#[path = "support/decoders.rs"]
mod decoders;
mod support;

use decoders::{Counting, allocated};
use pp_contract::*;
use pp_testing::Toy;
use proptest::prelude::*;
use support::*;

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
    first_frames().into_iter().map(|(_, frame)| frame).collect()
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
    fn any_valid_envelope_survives_the_wire(
        (steps, recompute) in (0..20u32, any::<bool>()),
        (height, width) in (1..=65536u32, 1..=65536u32),
        (start, seed) in any::<(u64, u64)>(),
        flags in any::<[bool; 3]>(),
        (bias, noise) in (-1e30f32..1e30, 0f32..1e30),
        dims in prop::collection::vec(0..60u64, 0..6),
        embeds in 0..5000u64,
        (chunk, epoch) in any::<(u64, u64)>(),
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
        }).unwrap();
        let mut tensors = vec![
            tensor("latents_in", DType::Bf16, &dims),
            tensor("conditioning_embeds", DType::Bf16, &[embeds]),
            tensor("denoising_step_list", DType::I64, &[steps.into()]),
        ];
        if recompute {
            tensors.push(tensor("context_frames", DType::Bf16, &dims));
        }
        let inputs = Manifest::new(&tensors).unwrap();
        let outputs = Manifest::new(&[tensor("latents_out", DType::Bf16, &dims)]).unwrap();
        let envelope = Envelope::new(plan, inputs, outputs).unwrap();

        let mut composer = Composer::new();
        let prepared = composer.prepare_envelope(&envelope).unwrap();
        let sent = prepared.commit(&mut Sequencer::new(), fresh(chunk, epoch));
        let mut lockstep = Lockstep::requests();
        let matched = lockstep.admit(sent.frame()).unwrap();
        prop_assert_eq!(matched.header(), sent.header());
        prop_assert_eq!(matched.envelope::<VideoPlan>().unwrap(), envelope);
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
    let (envelope, outcome, failure) = (envelope(), outcome(), failure());
    let mut composer = Composer::new();
    let mut sequencer = Sequencer::new();
    let (bytes, ()) = allocated(|| {
        for chunk in 0..1000 {
            let stamp = fresh(chunk, 0);
            let prepared = composer.prepare_envelope(&envelope).unwrap();
            let _ = prepared.commit(&mut sequencer, stamp);
            let prepared = composer.prepare_outcome(&outcome).unwrap();
            let _ = prepared.commit(&mut sequencer, stamp);
            let prepared = composer.prepare_failure(&failure).unwrap();
            let _ = prepared.commit(&mut sequencer, stamp);
            let _ = composer
                .prepare_bare(Bare::Noop)
                .commit(&mut sequencer, stamp);
        }
    });
    assert_eq!(bytes, 0);
}

#[test]
fn envelope_of_a_chunk_like_the_last_allocates_nothing() {
    let (inputs, outputs) = (inputs(), outputs());
    let mut parts = plan_parts();
    let (bytes, ()) = allocated(|| {
        for frame in 0..1000 {
            parts.current_start_frame = frame;
            let plan = VideoPlan::new(parts).unwrap();
            let _ = Envelope::new(plan, inputs.clone(), outputs.clone()).unwrap();
        }
    });
    assert_eq!(bytes, 0);
}

#[test]
fn admitting_allocates_nothing() {
    let frames = frames();
    let mut lockstep = Lockstep::requests();
    let (bytes, admitted) = allocated(|| lockstep.admit(&frames[2]).is_ok());
    assert!(admitted);
    assert_eq!(bytes, 0);
}

// A plan sees the tensors without their seal, which is a manifest more.
#[test]
fn largest_sealed_manifests_are_decoded_within_the_bound() {
    let specs: Vec<_> = (0..MAX_TENSORS - 1)
        .map(|n| tensor(&format!("{n:048}"), DType::U8, &[1; MAX_DIMS]))
        .collect();
    let sealed = || Manifest::new(&specs).unwrap().sealed().unwrap();
    let envelope = Envelope::new(Toy(plan_parts()), sealed(), sealed()).unwrap();
    let mut composer = Composer::new();
    let prepared = composer.prepare_envelope(&envelope).unwrap();
    let sent = prepared.commit(&mut Sequencer::new(), fresh(0, 0));
    decoders::frame(sent.frame());
}
