// The strength of the noise of a frame, and the small tensors that carry it.
//
// The estimate is the one of the CPU backend, in integers and doubles, so that both give the same bits: the median of
// |difference of two Laplacians| over a plane (J. Immerkaer, "Fast noise variance estimation", CVIU 64(2), 1996).

#include "geometry.cuh"

using namespace pp;

// |response| is at most 16 * 255; the histogram of a plane is padded to a multiple of the threads.
constexpr int kBins = 4096;

// Counts the responses of each plane. `histogram` holds kBins counters for each plane and must be zero at the start.
// Grid: (any, planes); block: 256.
extern "C" __global__ void __launch_bounds__(256)
noise_count(const uint8_t* __restrict__ frame, const __grid_constant__ Geometry geometry, uint32_t* __restrict__ histogram) {
    __shared__ uint32_t bins[kBins];
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) {
        bins[i] = 0;
    }
    __syncthreads();
    const Plane plane = geometry.plane[blockIdx.y];
    const uint8_t* samples = frame + plane.offset;
    const int64_t inner = plane.width > 2 && plane.height > 2 ? int64_t(plane.width - 2) * (plane.height - 2) : 0;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < inner; i += int64_t(gridDim.x) * blockDim.x) {
        const uint8_t* b = samples + (i / (plane.width - 2) + 1) * plane.width + i % (plane.width - 2) + 1;
        // Clipped samples say nothing about the noise.
        if (*b == 0 || *b == 255) {
            continue;
        }
        const uint8_t* a = b - plane.width;
        const uint8_t* c = b + plane.width;
        const int response = a[-1] + a[1] + c[-1] + c[1] - 2 * (a[0] + b[-1] + b[1] + c[0]) + 4 * b[0];
        atomicAdd(&bins[abs(response)], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) {
        if (bins[i] != 0) {
            atomicAdd(&histogram[blockIdx.y * kBins + i], bins[i]);
        }
    }
}

// The standard deviation of the noise of each plane from its histogram, which is set to zero for the next time.
// Grid: planes; block: 1024.
extern "C" __global__ void __launch_bounds__(1024) noise_sigma(uint32_t* __restrict__ histogram, float* __restrict__ sigma) {
    constexpr int kThreads = 1024;
    constexpr int kEach = kBins / kThreads;
    __shared__ uint32_t sums[kThreads];
    uint32_t* bins = histogram + blockIdx.x * kBins + threadIdx.x * kEach;
    uint32_t own[kEach];
    uint32_t total = 0;
    for (int i = 0; i < kEach; ++i) {
        own[i] = bins[i];
        bins[i] = 0;
        total += own[i];
    }
    sums[threadIdx.x] = total;
    __syncthreads();
    for (int step = 1; step < kThreads; step *= 2) {
        const uint32_t left = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += left;
        __syncthreads();
    }
    const uint32_t count = sums[kThreads - 1];
    if (count == 0) {
        if (threadIdx.x == 0) {
            sigma[blockIdx.x] = 0.0f;
        }
        return;
    }
    // The median by counting, with the place inside its bin interpolated. Exactly one bin is the first to reach half.
    const double half = double(count) / 2.0;
    double below = double(sums[threadIdx.x] - total);
    for (int i = 0; i < kEach; ++i) {
        const double n = double(own[i]);
        const int value = threadIdx.x * kEach + i;
        if (below < half && below + n >= half) {
            // Bin `value` covers value +- 0.5, bin 0 only its upper half.
            const double start = value == 0 ? 0.0 : double(value) - 0.5;
            const double length = value == 0 ? 0.5 : 1.0;
            const double median = __dadd_rn(start, __ddiv_rn(__dmul_rn(length, half - below), n));
            // Response of white noise: variance 36 sigma^2; median of |N(0,1)|: 0.6745.
            sigma[blockIdx.x] = float(__ddiv_rn(median, 6.0 * 0.67448975));
        }
        below += n;
    }
}

// Writes the tensors `conditioning_embeds` and `denoising_step_list`: the first pass has the strength `first`, all
// others `rest` (in thousandths). Grid: 1; block: 32.
extern "C" __global__ void __launch_bounds__(32)
conditioning(const float* __restrict__ sigma, int32_t planes, __nv_bfloat16* __restrict__ embeds, int64_t* __restrict__ steps,
             int32_t step_count, int64_t first, int64_t rest) {
    if (threadIdx.x < planes) {
        embeds[threadIdx.x] = __float2bfloat16_rn(sigma[threadIdx.x]);
    }
    for (int i = threadIdx.x; i < step_count; i += blockDim.x) {
        steps[i] = i == 0 ? first : rest;
    }
}

// Keeps the noise of each plane as Phase B will use it; what lies outside 0..=255 is moved to the nearest, NaN to 0.
// Grid: 1; block: 32.
extern "C" __global__ void __launch_bounds__(32)
condition(const __nv_bfloat16* __restrict__ embeds, int32_t planes, float* __restrict__ sigma) {
    if (threadIdx.x < planes) {
        sigma[threadIdx.x] = fminf(fmaxf(__bfloat162float(embeds[threadIdx.x]), 0.0f), 255.0f);
    }
}
