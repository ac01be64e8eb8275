//! Between the kernels' lists of tensors and the contract's manifests: the same rule of layout.

use pp_contract::{DType, Manifest, TensorSpec, VideoPlan, VideoPlanParts};
use pp_kernels::{Plan, TensorList};

/// The manifest that describes the same payload.
pub(super) fn manifest_of(list: &TensorList) -> anyhow::Result<Manifest> {
    let specs: Vec<TensorSpec> = list
        .as_slice()
        .iter()
        .map(|t| TensorSpec::new(t.name(), to_wire(t.dtype()), t.dims()))
        .collect::<Result<_, _>>()?;
    let manifest = Manifest::new(&specs)?;
    anyhow::ensure!(
        manifest.payload_bytes() == list.payload_bytes() as u64,
        "the kernels lay {} bytes out, the manifest {}",
        list.payload_bytes(),
        manifest.payload_bytes()
    );
    Ok(manifest)
}

/// The list that describes the same payload.
pub(super) fn list_of(manifest: &Manifest) -> Result<TensorList, pp_kernels::Failure> {
    let specs = manifest.iter().map(|(_, spec)| {
        pp_kernels::TensorSpec::new(spec.name(), from_wire(spec.dtype()), spec.shape().dims())
    });
    TensorList::new(specs.collect::<Result<Vec<_>, _>>()?)
}

fn to_wire(dtype: pp_kernels::DType) -> DType {
    match dtype {
        pp_kernels::DType::U8 => DType::U8,
        pp_kernels::DType::I32 => DType::I32,
        pp_kernels::DType::I64 => DType::I64,
        pp_kernels::DType::Bf16 => DType::Bf16,
        pp_kernels::DType::F16 => DType::F16,
        pp_kernels::DType::F32 => DType::F32,
    }
}

fn from_wire(dtype: DType) -> pp_kernels::DType {
    match dtype {
        DType::U8 => pp_kernels::DType::U8,
        DType::I32 => pp_kernels::DType::I32,
        DType::I64 => pp_kernels::DType::I64,
        DType::Bf16 => pp_kernels::DType::Bf16,
        DType::F16 => pp_kernels::DType::F16,
        DType::F32 => pp_kernels::DType::F32,
    }
}

/// The plan as it travels.
pub(super) fn to_contract(plan: &Plan) -> Result<VideoPlan, pp_contract::PlanError> {
    VideoPlan::new(VideoPlanParts {
        height: plan.height,
        width: plan.width,
        current_start_frame: plan.current_start_frame,
        do_kv_recompute: plan.do_kv_recompute,
        num_denoise_steps: plan.num_denoise_steps,
        expected_generator_calls: plan.expected_generator_calls,
        init_cache: plan.init_cache,
        reset_kv_cache: plan.reset_kv_cache,
        reset_crossattn_cache: plan.reset_crossattn_cache,
        base_seed: plan.base_seed,
        kv_cache_attention_bias: plan.kv_cache_attention_bias,
        noise_scale: plan.noise_scale,
    })
}

/// The plan as the kernels take it.
pub(super) fn to_kernels(parts: &VideoPlanParts) -> Plan {
    Plan {
        height: parts.height,
        width: parts.width,
        current_start_frame: parts.current_start_frame,
        do_kv_recompute: parts.do_kv_recompute,
        num_denoise_steps: parts.num_denoise_steps,
        expected_generator_calls: parts.expected_generator_calls,
        init_cache: parts.init_cache,
        reset_kv_cache: parts.reset_kv_cache,
        reset_crossattn_cache: parts.reset_crossattn_cache,
        base_seed: parts.base_seed,
        kv_cache_attention_bias: parts.kv_cache_attention_bias,
        noise_scale: parts.noise_scale,
    }
}
