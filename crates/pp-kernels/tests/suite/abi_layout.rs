//! The Rust mirror and the C header agree on every size and offset: a C compiler asserts what `offset_of!` says.

use pp_contract::MAX_CONTEXT_GAPS;
use pp_kernels::{DType, abi};
use std::fmt::Write;
use std::mem::{offset_of, size_of};

use crate::common::compile_c;

/// One assertion for the size of each struct and one for the offset of each of its fields.
macro_rules! asserts {
    ($($rust:ident $c:literal { $($field:ident)* })*) => {{
        let mut c = String::from("#include <pp_kernel.h>\n#include <stddef.h>\n");
        $(
            writeln!(c, "_Static_assert(sizeof({}) == {}, \"size\");", $c, size_of::<abi::$rust>()).unwrap();
            $(writeln!(
                c,
                "_Static_assert(offsetof({}, {}) == {}, \"offset\");",
                $c, stringify!($field), offset_of!(abi::$rust, $field)
            ).unwrap();)*
        )*
        c
    }};
}

/// What the header defines.
fn constants() -> Vec<(&'static str, u64)> {
    vec![
        ("PP_KERNELS_MAGIC", abi::MAGIC),
        ("PP_KERNELS_MAJOR", abi::MAJOR.into()),
        ("PP_KERNELS_MINOR", abi::MINOR.into()),
        ("PP_MAX_STAGES", abi::MAX_STAGES as u64),
        ("PP_MAX_TENSORS", abi::MAX_TENSORS as u64),
        ("PP_STAGE_SOURCE", abi::STAGE_SOURCE.into()),
        ("PP_STAGE_MIDDLE", abi::STAGE_MIDDLE.into()),
        ("PP_STAGE_SINK", abi::STAGE_SINK.into()),
        ("PP_STAGE_PARTS", abi::STAGE_PARTS.into()),
        ("PP_STAGE_GROUP", abi::STAGE_GROUP.into()),
        ("PP_STAGE_RING", abi::STAGE_RING.into()),
        ("PP_STAGE_NO_MEMORY", abi::STAGE_NO_MEMORY.into()),
        ("PP_STAGE_SAME_BYTES", abi::STAGE_SAME_BYTES.into()),
        ("PP_STAGE_GAPS", abi::STAGE_GAPS.into()),
        ("PP_STAGE_STEPS", abi::STAGE_STEPS.into()),
        ("PP_MAX_CONTEXT_GAPS", MAX_CONTEXT_GAPS as u64),
        ("PP_TENSOR_ALIGN", abi::TENSOR_ALIGN),
        ("PP_OK", abi::OK.into()),
        ("PP_ERROR", abi::ERROR.into()),
        ("PP_INVALID_ARGUMENT", abi::INVALID_ARGUMENT.into()),
        ("PP_UNSUPPORTED", abi::UNSUPPORTED.into()),
        ("PP_OUT_OF_MEMORY", abi::OUT_OF_MEMORY.into()),
        ("PP_PANIC", abi::PANIC.into()),
        ("PP_SPACE_HOST", abi::SPACE_HOST.into()),
        ("PP_SPACE_CUDA", abi::SPACE_CUDA.into()),
        ("PP_CHROMA_MONO", abi::CHROMA_MONO.into()),
        ("PP_CHROMA_420", abi::CHROMA_420.into()),
        ("PP_CHROMA_422", abi::CHROMA_422.into()),
        ("PP_CHROMA_444", abi::CHROMA_444.into()),
        ("PP_DTYPE_U8", abi::dtype_code(DType::U8).into()),
        ("PP_DTYPE_I32", abi::dtype_code(DType::I32).into()),
        ("PP_DTYPE_I64", abi::dtype_code(DType::I64).into()),
        ("PP_DTYPE_BF16", abi::dtype_code(DType::Bf16).into()),
        ("PP_DTYPE_F16", abi::dtype_code(DType::F16).into()),
        ("PP_DTYPE_F32", abi::dtype_code(DType::F32).into()),
        ("PP_DTYPE_BOOL", abi::dtype_code(DType::Bool).into()),
        ("PP_DTYPE_I8", abi::dtype_code(DType::I8).into()),
        ("PP_DTYPE_I16", abi::dtype_code(DType::I16).into()),
        ("PP_DTYPE_U16", abi::dtype_code(DType::U16).into()),
        ("PP_DTYPE_U32", abi::dtype_code(DType::U32).into()),
        ("PP_DTYPE_F64", abi::dtype_code(DType::F64).into()),
        ("PP_DTYPE_F8E4M3FN", abi::dtype_code(DType::F8E4m3fn).into()),
        ("PP_DTYPE_F8E5M2", abi::dtype_code(DType::F8E5m2).into()),
    ]
}

#[test]
fn header_and_mirror_have_the_same_layout() {
    let mut c = asserts! {
        ErrorText "pp_error" { struct_size reserved text capacity length }
        PpStage "pp_stage" { name kind flags }
        PpArg "pp_arg" { key value }
        PpGeometry "pp_geometry" { struct_size width height chroma frames_per_frame bits }
        PpDescription "pp_description" {
            struct_size spaces chroma_formats context_frames digest name version stage_capacity stage_count stages bits
            reserved
        }
        PpSessionConfig "pp_session_config" {
            struct_size space width height chroma max_frames threads noise_sigma device stream stage part parts laps
            member members arg_count bits args
        }
        PpPlan "pp_plan" {
            struct_size height width num_denoise_steps expected_generator_calls do_kv_recompute init_cache
            reset_kv_cache reset_crossattn_cache kv_cache_attention_bias noise_scale skipped_frames
            current_start_frame base_seed context_skipped
        }
        PpTensor "pp_tensor" { name dtype ndim dims offset bytes }
        PpPayload "pp_payload" { struct_size tensor_count tensors data bytes }
        PpPlane "pp_plane" { data stride width height }
        PpFrame "pp_frame" { planes }
        PpLayoutArgs "pp_layout_args" {
            struct_size frames steps context_frames lap capacity input_count output_count inputs outputs
        }
        PpGroup "pp_group" {
            struct_size reserved context broadcast scatter gather all_reduce_sum send receive barrier
        }
        PpRunArgs "pp_run_args" {
            struct_size lap frame_count observed_generator_calls plan frames input output group
        }
        Table "pp_kernels_table" { describe create destroy layout run self_test }
    };
    // The head of the table is flat in C.
    for (field, offset) in [
        ("magic", offset_of!(abi::TableHead, magic)),
        ("struct_size", offset_of!(abi::TableHead, struct_size)),
        ("major", offset_of!(abi::TableHead, major)),
        ("minor", offset_of!(abi::TableHead, minor)),
    ] {
        writeln!(
            c,
            "_Static_assert(offsetof(pp_kernels_table, {field}) == {offset}, \"offset\");"
        )
        .unwrap();
    }
    for (name, value) in constants() {
        writeln!(c, "_Static_assert({name} == {value}ull, \"value\");").unwrap();
    }
    // A shared library with nothing in it but true assertions.
    compile_c("layout", &c, &[]);
}
