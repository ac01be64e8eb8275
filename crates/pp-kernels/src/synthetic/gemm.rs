//! Matrix products in bf16 through cublasLt, planned once per shape.
//!
//! Everything that costs time on the host (descriptors, layouts, the choice of an algorithm, the workspace) is made
//! in [`Gemm::new`]; [`Gemm::enqueue`] is one call of the library.

use std::ffi::c_void;
use std::ptr;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::cublaslt::CublasLt;
use crate::cuda::CudaError;
use crate::cuda::driver::Stream;
use crate::cuda::memory::Memory;

/// What the library may use beside the matrices; 32 MiB is what it asks for on Hopper.
const WORKSPACE: usize = 32 << 20;

/// One product of square matrices, `D = A · B`, from the same A and B every time, so that values neither grow nor
/// vanish however often it runs.
#[derive(Debug)]
pub(crate) struct Gemm {
    plan: Plan,
    a: Memory,
    b: Memory,
    d: Memory,
    workspace: Memory,
    size: u32,
}

/// The library's objects, destroyed in the end; what was not made is null.
#[derive(Debug)]
struct Plan {
    handle: sys::cublasLtHandle_t,
    product: sys::cublasLtMatmulDesc_t,
    layout: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: handles of the library may be used from any thread, one at a time, which `&mut self` of the work sees to.
unsafe impl Send for Plan {}

fn judge<T>(function: &'static str, outcome: Result<T, CublasError>) -> Result<T, CudaError> {
    outcome.map_err(|error| CudaError::Library {
        function,
        status: error.to_string(),
    })
}

impl Plan {
    fn new(_: CublasLt, size: u32) -> Result<Plan, CudaError> {
        let mut plan = Plan {
            handle: judge("cublasLtCreate", result::create_handle())?,
            product: ptr::null_mut(),
            layout: ptr::null_mut(),
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        let side = u64::from(size);
        plan.product = judge(
            "cublasLtMatmulDescCreate",
            result::create_matmul_desc(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType::CUDA_R_32F,
            ),
        )?;
        // Square matrices of one type have one layout.
        plan.layout = judge(
            "cublasLtMatrixLayoutCreate",
            result::create_matrix_layout(
                sys::cudaDataType::CUDA_R_16BF,
                side,
                side,
                i64::from(size),
            ),
        )?;
        let preference = judge(
            "cublasLtMatmulPreferenceCreate",
            result::create_matmul_pref(),
        )?;
        let attribute =
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = WORKSPACE;
        // SAFETY: all objects were made above and live across the calls; the attribute is a size_t.
        let chosen = unsafe {
            let value = (&raw const bytes).cast::<c_void>();
            let set = result::set_matmul_pref_attribute(
                preference,
                attribute,
                value,
                size_of_val(&bytes),
            );
            let chosen = set.and_then(|()| {
                result::get_matmul_algo_heuristic(
                    plan.handle,
                    plan.product,
                    plan.layout,
                    plan.layout,
                    plan.layout,
                    plan.layout,
                    preference,
                )
            });
            // Only the memory of the preference depends on it.
            let _ = result::destroy_matmul_pref(preference);
            chosen
        };
        plan.algorithm = judge("cublasLtMatmulAlgoGetHeuristic", chosen)?.algo;
        Ok(plan)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: each object was made once and is destroyed once; failures have nobody to hear them.
        unsafe {
            if !self.layout.is_null() {
                let _ = result::destroy_matrix_layout(self.layout);
            }
            if !self.product.is_null() {
                let _ = result::destroy_matmul_desc(self.product);
            }
            let _ = result::destroy_handle(self.handle);
        }
    }
}

impl Gemm {
    /// Plans products of `size`×`size` matrices and fills them; waits for the stream.
    pub(crate) fn new(stream: Stream, size: u32) -> Result<Gemm, CudaError> {
        let library = CublasLt::load()?;
        let elements = size as usize * size as usize;
        let matrix = || Memory::new(stream, 2 * elements);
        let gemm = Gemm {
            plan: Plan::new(library, size)?,
            a: matrix()?,
            b: matrix()?,
            d: matrix()?,
            workspace: Memory::new(stream, WORKSPACE)?,
            size,
        };
        for (seed, matrix) in [(1, &gemm.a), (2, &gemm.b)] {
            super::fill_with_noise(stream, matrix, seed)?;
        }
        Ok(gemm)
    }

    /// Operations of one product.
    pub(crate) fn flops(&self) -> f64 {
        2.0 * f64::from(self.size).powi(3)
    }

    /// Enqueues one product.
    pub(crate) fn enqueue(&mut self, stream: Stream) -> Result<(), CudaError> {
        let (one, zero) = (1f32, 0f32);
        let pointer =
            |memory: &Memory| ptr::without_provenance_mut::<c_void>(memory.address() as usize);
        let d = pointer(&self.d);
        // SAFETY: all objects of the plan live; the matrices are as large as the layout says, and freed behind all work
        // of this stream; the scalars are read before the call returns (host pointer mode is the default).
        let status = unsafe {
            result::matmul(
                self.plan.handle,
                self.plan.product,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                pointer(&self.a),
                self.plan.layout,
                pointer(&self.b),
                self.plan.layout,
                d,
                self.plan.layout,
                d,
                self.plan.layout,
                &raw const self.plan.algorithm,
                pointer(&self.workspace),
                self.workspace.bytes(),
                stream.raw().cast(),
            )
        };
        judge("cublasLtMatmul", status)
    }
}
