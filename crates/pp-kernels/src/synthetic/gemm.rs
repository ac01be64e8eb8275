//! Matrix products in bf16 through cublasLt, planned once per shape.
//!
//! Everything that costs time on the host (descriptors, layouts, the choice of an algorithm, the workspace) is made
//! in [`Gemm::new`]; [`Gemm::enqueue`] is one call of the library.

use std::ffi::c_void;
use std::ptr;

use cudarc::cublaslt::sys;
use pp_device::{Stream, StreamBuffer};

use super::cublaslt::{Choice, CublasLt, NOT_SUPPORTED, call, judge};
use crate::cuda::fill_with_noise;
use crate::error::Failure;

/// What the library may use beside the matrices; 32 MiB is what it asks for on Hopper.
const WORKSPACE: usize = 32 << 20;

/// One product of square matrices, `D = A · B`, from the same A and B every time, so that values neither grow nor
/// vanish however often it runs.
#[derive(Debug)]
pub(crate) struct Gemm {
    plan: Plan,
    a: StreamBuffer,
    b: StreamBuffer,
    d: StreamBuffer,
    workspace: StreamBuffer,
    size: u32,
}

/// The library's objects, destroyed in the end; what was not made is null.
#[derive(Debug)]
struct Plan {
    library: CublasLt,
    handle: sys::cublasLtHandle_t,
    product: sys::cublasLtMatmulDesc_t,
    layout: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: handles of the library may be used from any thread, one at a time, which `&mut self` of the work sees to.
unsafe impl Send for Plan {}

impl Plan {
    fn new(library: CublasLt, size: u32) -> Result<Plan, Failure> {
        let mut plan = Plan {
            library,
            handle: ptr::null_mut(),
            product: ptr::null_mut(),
            layout: ptr::null_mut(),
            algorithm: Choice::NONE.algorithm,
        };
        let (single, half) = (
            sys::cudaDataType::CUDA_R_32F,
            sys::cudaDataType::CUDA_R_16BF,
        );
        let sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let (side, stride) = (u64::from(size), i64::from(size));
        let mut preference = ptr::null_mut();
        // SAFETY: each writes one object to a place that is ours. Square matrices of one type have one layout.
        unsafe {
            call!(library, cublasLtCreate(&raw mut plan.handle))?;
            let product = &raw mut plan.product;
            call!(library, cublasLtMatmulDescCreate(product, sums, single))?;
            let layout = &raw mut plan.layout;
            call!(
                library,
                cublasLtMatrixLayoutCreate(layout, half, side, side, stride)
            )?;
            call!(library, cublasLtMatmulPreferenceCreate(&raw mut preference))?;
        }
        let chosen = plan.choose(preference);
        // SAFETY: made above, destroyed once; only its own memory depends on it.
        let _ = unsafe { call!(library, cublasLtMatmulPreferenceDestroy(preference)) };
        plan.algorithm = chosen?;
        Ok(plan)
    }

    /// The best algorithm for the workspace.
    fn choose(
        &self,
        preference: sys::cublasLtMatmulPreference_t,
    ) -> Result<sys::cublasLtMatmulAlgo_t, Failure> {
        const FUNCTION: &str = "cublasLtMatmulAlgoGetHeuristic";
        let attribute =
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = WORKSPACE;
        let (mut choice, mut count) = (Choice::NONE, 0);
        // SAFETY: all objects live across the calls; the attribute is a size_t; there is room for one choice.
        unsafe {
            let value = (&raw const bytes).cast::<c_void>();
            let size = size_of_val(&bytes);
            call!(
                self.library,
                cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, size)
            )?;
            call!(
                self.library,
                cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    self.product,
                    self.layout,
                    self.layout,
                    self.layout,
                    self.layout,
                    preference,
                    1,
                    &raw mut choice,
                    &raw mut count,
                )
            )?;
        }
        judge(
            FUNCTION,
            if count > 0 {
                choice.state
            } else {
                NOT_SUPPORTED
            },
        )?;
        Ok(choice.algorithm)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: each object was made once and is destroyed once; a drop has no caller to tell of a failure.
        unsafe {
            if !self.layout.is_null() {
                let _ = call!(self.library, cublasLtMatrixLayoutDestroy(self.layout));
            }
            if !self.product.is_null() {
                let _ = call!(self.library, cublasLtMatmulDescDestroy(self.product));
            }
            if !self.handle.is_null() {
                let _ = call!(self.library, cublasLtDestroy(self.handle));
            }
        }
    }
}

impl Gemm {
    /// Plans products of `size`×`size` matrices and fills them; waits for the stream.
    pub(crate) fn new(stream: &Stream, size: u32) -> Result<Gemm, Failure> {
        let library = CublasLt::load()?;
        let elements = size as usize * size as usize;
        let matrix = || StreamBuffer::new(stream, 2 * elements);
        let gemm = Gemm {
            plan: Plan::new(library, size)?,
            a: matrix()?,
            b: matrix()?,
            d: matrix()?,
            workspace: StreamBuffer::new(stream, WORKSPACE)?,
            size,
        };
        for (seed, matrix) in [(1, &gemm.a), (2, &gemm.b)] {
            fill_with_noise(matrix, seed)?;
        }
        Ok(gemm)
    }

    /// Operations of one product.
    pub(crate) fn flops(&self) -> f64 {
        2.0 * f64::from(self.size).powi(3)
    }

    /// Enqueues one product.
    pub(crate) fn enqueue(&mut self, stream: &Stream) -> Result<(), Failure> {
        let (one, zero) = (1f32, 0f32);
        let pointer = |memory: &StreamBuffer| {
            ptr::without_provenance_mut::<c_void>(memory.address() as usize)
        };
        let d = pointer(&self.d);
        // SAFETY: all objects of the plan live; the matrices are as large as the layout says, and freed behind all work
        // of this stream; the scalars are read before the call returns (host pointer mode is the default).
        unsafe {
            call!(
                self.plan.library,
                cublasLtMatmul(
                    self.plan.handle,
                    self.plan.product,
                    (&raw const one).cast(),
                    pointer(&self.a),
                    self.plan.layout,
                    pointer(&self.b),
                    self.plan.layout,
                    (&raw const zero).cast(),
                    d,
                    self.plan.layout,
                    d,
                    self.plan.layout,
                    &raw const self.plan.algorithm,
                    pointer(&self.workspace),
                    self.workspace.len(),
                    ptr::without_provenance_mut(stream.raw() as usize),
                )
            )
        }
    }
}
