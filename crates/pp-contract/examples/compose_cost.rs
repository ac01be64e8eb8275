//! What a message costs at each end, in nanoseconds: `cargo run --release --example compose_cost`.
//!
//! Median and least of 200 rounds of 2000 messages, on one thread, everything in the cache.

use std::hint::black_box;
use std::time::Instant;

use pp_contract::*;

const ROUNDS: usize = 200;
const MESSAGES: u64 = 2000;

fn main() {
    let (inputs, outputs) = manifests();
    let epoch = CacheEpoch::new(0);
    let outcome = Outcome {
        observed_calls: 5,
        phase_b_us: 15_000,
        idle_us: 3,
        start_frame: 16,
        seal: None,
        outputs: outputs.clone(),
    };
    let envelope = |chunk| Envelope::new(plan(chunk), inputs.clone(), outputs.clone()).unwrap();
    let mut composer = Composer::new();

    let mut sequencer = Sequencer::new();
    report("front: plan, envelope, prepare, commit", |chunk| {
        let envelope = envelope(chunk);
        let prepared = composer.prepare_envelope(&envelope).unwrap();
        let stamp = Stamp::fresh(ChunkIndex::new(chunk), epoch);
        black_box(prepared.commit(&mut sequencer, stamp).frame().len());
    });

    let requests = frames(|composer, sequencer, chunk| {
        let envelope = envelope(chunk);
        let prepared = composer.prepare_envelope(&envelope).unwrap();
        let stamp = Stamp::fresh(ChunkIndex::new(chunk), epoch);
        prepared.commit(sequencer, stamp).frame().to_vec()
    });
    let mut lockstep = Lockstep::requests();
    report("phase B: admit", |chunk| {
        if chunk == 0 {
            lockstep = Lockstep::requests();
        }
        black_box(lockstep.admit(&requests[chunk as usize]).unwrap().header());
    });
    report("phase B: admit, decode the envelope", |chunk| {
        if chunk == 0 {
            lockstep = Lockstep::requests();
        }
        let matched = lockstep.admit(&requests[chunk as usize]).unwrap();
        black_box(matched.envelope::<VideoPlan>().unwrap());
    });

    let calls: Vec<Header> = requests
        .iter()
        .map(|frame| Header::decode(frame.first_chunk().unwrap()).unwrap())
        .collect();
    let mut sequencer = Sequencer::new();
    report("phase B: prepare and commit the result", |chunk| {
        let prepared = composer.prepare_outcome(&outcome).unwrap();
        let stamp = Stamp::echo(&calls[chunk as usize]);
        black_box(prepared.commit(&mut sequencer, stamp).frame().len());
    });

    let results = frames(|composer, sequencer, chunk| {
        let prepared = composer.prepare_outcome(&outcome).unwrap();
        let stamp = Stamp::echo(&calls[chunk as usize]);
        prepared.commit(sequencer, stamp).frame().to_vec()
    });
    let mut replies = Lockstep::replies();
    report("front: expect, admit, decode, judge", |chunk| {
        if chunk == 0 {
            replies = Lockstep::replies();
        }
        let call = &calls[chunk as usize];
        replies.expect(call);
        let matched = replies.admit(&results[chunk as usize]).unwrap();
        let outcome = matched.outcome().unwrap();
        let expectation = Expectation {
            call_id: call.call_id(),
            chunk_index: call.chunk_index(),
            cache_epoch: call.cache_epoch(),
            expected_calls: 5,
            start_frame: 16,
            outputs: &outputs,
        };
        let verdict = expectation.judge(matched.header(), &outcome, epoch);
        assert_eq!(black_box(verdict), Ok(Verdict::Accept));
    });
    println!(
        "frames: request {} bytes, result {} bytes",
        requests[0].len(),
        results[0].len()
    );
}

fn frames(mut one: impl FnMut(&mut Composer, &mut Sequencer, u64) -> Vec<u8>) -> Vec<Vec<u8>> {
    let (mut composer, mut sequencer) = (Composer::new(), Sequencer::new());
    (0..MESSAGES)
        .map(|chunk| one(&mut composer, &mut sequencer, chunk))
        .collect()
}

fn report(what: &str, mut work: impl FnMut(u64)) {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            (0..MESSAGES).for_each(&mut work);
            start.elapsed().as_nanos() as f64 / MESSAGES as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    println!(
        "{what:42} median {:4.0} ns, least {:4.0} ns",
        rounds[ROUNDS / 2],
        rounds[0]
    );
}

fn plan(chunk: u64) -> VideoPlan {
    let parts = VideoPlanParts {
        height: 288,
        width: 352,
        current_start_frame: chunk * 4,
        do_kv_recompute: true,
        num_denoise_steps: 4,
        expected_generator_calls: 5,
        init_cache: false,
        reset_kv_cache: false,
        reset_crossattn_cache: false,
        base_seed: 42,
        kv_cache_attention_bias: 0.5,
        noise_scale: 20.0,
    };
    VideoPlan::new(parts).unwrap()
}

fn manifests() -> (Manifest, Manifest) {
    let tensor = |name, dtype, dims: &[u64]| TensorSpec::new(name, dtype, dims).unwrap();
    let inputs = Manifest::new(&[
        tensor("latents_in", DType::Bf16, &[4, 1584, 192]),
        tensor("conditioning_embeds", DType::Bf16, &[512]),
        tensor("denoising_step_list", DType::I64, &[4]),
        tensor("context_frames", DType::Bf16, &[1, 1584, 192]),
    ]);
    let outputs = Manifest::new(&[tensor("latents_out", DType::Bf16, &[4, 1584, 192])]);
    (inputs.unwrap(), outputs.unwrap())
}
