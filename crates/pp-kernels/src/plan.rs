//! The plan of one chunk, as kernels see it.

use crate::abi;
use crate::error::Failure;

/// The plan of one chunk: the fields of the envelope, plain data.
///
/// What each one steers in the default kernels stands in [`crate::reference`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// Height of the luma plane.
    pub height: u32,
    /// Width of the luma plane.
    pub width: u32,
    /// Index of the chunk's first frame in the stream.
    pub current_start_frame: u64,
    /// Rebuild the cache from the tensor `context_frames`.
    pub do_kv_recompute: bool,
    /// Passes over the chunk; 0 is the identity.
    pub num_denoise_steps: u32,
    /// Steps, and one more with recompute.
    pub expected_generator_calls: u32,
    /// First chunk of the session.
    pub init_cache: bool,
    /// Forget the frames of earlier chunks (a hard cut).
    pub reset_kv_cache: bool,
    /// Read `conditioning_embeds` again.
    pub reset_crossattn_cache: bool,
    /// Seed of everything that is drawn at random.
    pub base_seed: u64,
    /// Added to the attention logit of keys from earlier chunks.
    pub kv_cache_attention_bias: f32,
    /// Factor on the strength.
    pub noise_scale: f32,
}

impl Plan {
    /// A plan for the first chunk of a stream: `steps` passes, no recompute, everything fresh.
    #[must_use]
    pub fn first(width: u32, height: u32, steps: u32) -> Plan {
        Plan {
            height,
            width,
            current_start_frame: 0,
            do_kv_recompute: false,
            num_denoise_steps: steps,
            expected_generator_calls: steps,
            init_cache: true,
            reset_kv_cache: false,
            reset_crossattn_cache: false,
            base_seed: 0,
            kv_cache_attention_bias: 0.0,
            noise_scale: 1.0,
        }
    }

    /// The plan of a later chunk that starts at frame `start`, with or without recompute.
    #[must_use]
    pub fn following(self, start: u64, recompute: bool) -> Plan {
        Plan {
            current_start_frame: start,
            do_kv_recompute: recompute,
            expected_generator_calls: self.num_denoise_steps + u32::from(recompute),
            init_cache: false,
            reset_kv_cache: false,
            reset_crossattn_cache: false,
            ..self
        }
    }

    pub(crate) fn to_abi(self) -> abi::Plan {
        abi::Plan {
            struct_size: abi::size::<abi::Plan>(),
            height: self.height,
            width: self.width,
            num_denoise_steps: self.num_denoise_steps,
            expected_generator_calls: self.expected_generator_calls,
            do_kv_recompute: self.do_kv_recompute.into(),
            init_cache: self.init_cache.into(),
            reset_kv_cache: self.reset_kv_cache.into(),
            reset_crossattn_cache: self.reset_crossattn_cache.into(),
            kv_cache_attention_bias: self.kv_cache_attention_bias,
            noise_scale: self.noise_scale,
            reserved: 0,
            current_start_frame: self.current_start_frame,
            base_seed: self.base_seed,
        }
    }

    pub(crate) fn from_abi(raw: &abi::Plan) -> Result<Plan, Failure> {
        let flag = |name: &str, value: u32| match value {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Failure::invalid(format!(
                "{name} is {other}, must be 0 or 1"
            ))),
        };
        let plan = Plan {
            height: raw.height,
            width: raw.width,
            current_start_frame: raw.current_start_frame,
            do_kv_recompute: flag("do_kv_recompute", raw.do_kv_recompute)?,
            num_denoise_steps: raw.num_denoise_steps,
            expected_generator_calls: raw.expected_generator_calls,
            init_cache: flag("init_cache", raw.init_cache)?,
            reset_kv_cache: flag("reset_kv_cache", raw.reset_kv_cache)?,
            reset_crossattn_cache: flag("reset_crossattn_cache", raw.reset_crossattn_cache)?,
            base_seed: raw.base_seed,
            kv_cache_attention_bias: raw.kv_cache_attention_bias,
            noise_scale: raw.noise_scale,
        };
        plan.validate()?;
        Ok(plan)
    }

    /// Checks what must hold for every plan.
    ///
    /// # Errors
    /// Calls that do not add up, or a factor that is not finite.
    pub fn validate(&self) -> Result<(), Failure> {
        let calls = u64::from(self.num_denoise_steps) + u64::from(self.do_kv_recompute);
        if u64::from(self.expected_generator_calls) != calls {
            return Err(Failure::invalid(format!(
                "expected_generator_calls is {}, {} steps and {} recompute make {calls}",
                self.expected_generator_calls,
                self.num_denoise_steps,
                u32::from(self.do_kv_recompute)
            )));
        }
        if !self.kv_cache_attention_bias.is_finite() {
            return Err(Failure::invalid("kv_cache_attention_bias is not finite"));
        }
        if !(self.noise_scale.is_finite() && self.noise_scale >= 0.0) {
            return Err(Failure::invalid(format!(
                "noise_scale is {}, must be finite and not negative",
                self.noise_scale
            )));
        }
        Ok(())
    }
}
