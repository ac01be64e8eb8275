//! Between the types of pp-contract and the structs of the ABI.

use pp_contract::{DType, Manifest, Plan as _, TensorSpec, VideoPlan, VideoPlanParts};

use crate::abi::{self, MAX_TENSORS, dtype_code};
use crate::config::{read_text, write_text};
use crate::error::Failure;

const _: () = {
    assert!(MAX_TENSORS == pp_contract::MAX_TENSORS);
    assert!(abi::TENSOR_ALIGN == pp_contract::TENSOR_ALIGN_BYTES);
};

const EMPTY: abi::PpTensor = abi::PpTensor {
    name: [0; 48],
    dtype: 0,
    ndim: 0,
    dims: [0; 8],
    offset: 0,
    bytes: 0,
};

/// The tensors of a manifest as they cross the border.
pub(crate) struct RawTensors {
    tensors: [abi::PpTensor; MAX_TENSORS],
    count: usize,
}

impl RawTensors {
    /// Room for as many tensors as there can be.
    pub(crate) const EMPTY: RawTensors = RawTensors {
        tensors: [EMPTY; MAX_TENSORS],
        count: MAX_TENSORS,
    };

    /// Fails where a name fills the ABI's field and leaves no room for the NUL.
    pub(crate) fn new(manifest: &Manifest) -> Result<RawTensors, Failure> {
        let mut raw = RawTensors {
            count: manifest.len(),
            ..RawTensors::EMPTY
        };
        for (tensor, (offset, spec)) in raw.tensors.iter_mut().zip(manifest.iter()) {
            if spec.name().len() >= tensor.name.len() {
                return Err(Failure::invalid(format!(
                    "tensor name {} has more than 47 bytes",
                    spec.name()
                )));
            }
            write_text(&mut tensor.name, spec.name());
            let dims = spec.shape().dims();
            tensor.dtype = dtype_code(spec.dtype());
            tensor.ndim = dims.len() as u32;
            tensor.dims[..dims.len()].copy_from_slice(dims);
            (tensor.offset, tensor.bytes) = (offset, spec.bytes());
        }
        Ok(raw)
    }

    pub(crate) fn as_slice(&self) -> &[abi::PpTensor] {
        &self.tensors[..self.count]
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut abi::PpTensor {
        self.tensors.as_mut_ptr()
    }

    /// These tensors at `data`; valid for as long as `self` stays where it is.
    pub(crate) fn payload(&self, (data, bytes): (*mut u8, u64)) -> abi::PpPayload {
        abi::PpPayload {
            struct_size: abi::size::<abi::PpPayload>(),
            tensor_count: self.count as u32,
            tensors: self.tensors.as_ptr(),
            data,
            bytes,
        }
    }
}

/// The element type of a code of the ABI.
pub(crate) fn dtype(code: u32) -> Option<DType> {
    (DType::ALL.iter().copied()).find(|dtype| dtype_code(*dtype) == code)
}

fn spec(raw: &abi::PpTensor) -> Result<TensorSpec, Failure> {
    let name = read_text(&raw.name).unwrap_or_default();
    let dtype = dtype(raw.dtype).ok_or_else(|| {
        Failure::invalid(format!("tensor {name} has the unknown dtype {}", raw.dtype))
    })?;
    let dims = raw.dims.get(..raw.ndim as usize).ok_or_else(|| {
        Failure::invalid(format!(
            "tensor {name} has {} dimensions, at most 8",
            raw.ndim
        ))
    })?;
    Ok(TensorSpec::new(name, dtype, dims)?)
}

/// Checks names, types and shapes; what stands for places is ignored.
pub(crate) fn manifest(raw: &[abi::PpTensor]) -> Result<Manifest, Failure> {
    let specs: Vec<TensorSpec> = raw.iter().map(spec).collect::<Result<_, _>>()?;
    Ok(Manifest::new(&specs)?)
}

pub(crate) fn raw_plan(plan: &VideoPlanParts) -> abi::PpPlan {
    abi::PpPlan {
        struct_size: abi::size::<abi::PpPlan>(),
        height: plan.height,
        width: plan.width,
        num_denoise_steps: plan.num_denoise_steps,
        expected_generator_calls: plan.expected_generator_calls,
        do_kv_recompute: plan.do_kv_recompute.into(),
        init_cache: plan.init_cache.into(),
        reset_kv_cache: plan.reset_kv_cache.into(),
        reset_crossattn_cache: plan.reset_crossattn_cache.into(),
        kv_cache_attention_bias: plan.kv_cache_attention_bias,
        noise_scale: plan.noise_scale,
        skipped_frames: plan.skipped_frames,
        current_start_frame: plan.current_start_frame,
        base_seed: plan.base_seed,
        context_skipped: plan.context_skipped,
    }
}

pub(crate) fn plan(raw: &abi::PpPlan) -> Result<VideoPlanParts, Failure> {
    let flag = |name: &str, value: u32| match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Failure::invalid(format!(
            "{name} is {other}, must be 0 or 1"
        ))),
    };
    let plan = VideoPlan::new(VideoPlanParts {
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
        skipped_frames: raw.skipped_frames,
        context_skipped: raw.context_skipped,
    })?;
    Ok(*plan.parts())
}
