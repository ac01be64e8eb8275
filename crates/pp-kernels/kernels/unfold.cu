// Patch tokens to scratch frames (see geometry.cuh): rasters with a mirrored margin, and minus half the squared norm of
// the patch at every place, which the attention adds to the products of queries and keys.
//
// Samples are taken less 128, rounded to multiples of one half (those that encode makes are integers) and kept within
// -128..=128; NaN becomes -128. Norms are sums of 64 squares in f32, multiples of 1/4 up to 2^20: exact.
//
// Frame i goes to scratch slot (first_slot + i) % slots. Grid: (raster tiles of 64 x 32, frames * planes), where x must
// suffice for the largest plane; block: 256.

#include "geometry.cuh"

namespace pp {

constexpr int kTileX = 64;
constexpr int kTileY = 32;
constexpr int kSideX = kTileX + kPatch;  // one more than a patch needs, for the raster that is shifted by one sample
constexpr int kSideY = kTileY + kPatch - 1;

// `centre` is what the tokens' samples lie around.
__device__ inline void write_scratch(const __nv_bfloat16* __restrict__ tokens, uint8_t* __restrict__ scratch,
                                     const Geometry& geometry, int32_t first_slot, int32_t slots, float centre) {
    const int frame = blockIdx.y / geometry.planes;
    const int index = blockIdx.y % geometry.planes;
    const Plane plane = geometry.plane[index];
    const int raster_x = raster_width(plane);
    const int raster_y = raster_height(plane);
    const int tiles_x = (raster_x + kTileX - 1) / kTileX;
    const int left = int(blockIdx.x) % tiles_x * kTileX;
    const int top = int(blockIdx.x) / tiles_x * kTileY;
    if (top >= raster_y) {
        return;
    }
    __shared__ __nv_bfloat16 samples[kSideY][kSideX + 2];
    __shared__ float sums[kSideY][kTileX];

    tokens += (int64_t(frame) * geometry.tokens + plane.first_token) * kToken;
    for (int i = threadIdx.x; i < kSideX * kSideY; i += blockDim.x) {
        const int x = mirrored(left + i % kSideX - kMargin, plane.tokens_x * kPatch);
        const int y = mirrored(top + i / kSideX - kMargin, plane.tokens_y * kPatch);
        const int token = y / kPatch * plane.tokens_x + x / kPatch;
        const float sample = __bfloat162float(tokens[int64_t(token) * kToken + y % kPatch * kPatch + x % kPatch]);
        const float halves = fminf(fmaxf(rintf(2.0f * (sample - centre)), -2.0f * kCentre), 2.0f * kCentre);
        samples[i / kSideX][i % kSideX] = __float2bfloat16_rn(0.5f * halves);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTileX * kSideY; i += blockDim.x) {
        float sum = 0.0f;
        for (int dx = 0; dx < kPatch; ++dx) {
            const float sample = __bfloat162float(samples[i / kTileX][i % kTileX + dx]);
            sum += sample * sample;
        }
        sums[i / kTileX][i % kTileX] = sum;
    }
    __syncthreads();

    uint8_t* out = scratch + (first_slot + frame) % slots * raster_offset(geometry, geometry.planes) +
                   raster_offset(geometry, index);
    const int64_t area = raster_area(plane);
    __nv_bfloat16* even = reinterpret_cast<__nv_bfloat16*>(out);
    __nv_bfloat16* odd = even + area;
    float* norms = reinterpret_cast<float*>(odd + area);
    for (int i = threadIdx.x; i < kTileX * kTileY; i += blockDim.x) {
        const int x = i % kTileX;
        const int y = i / kTileX;
        if (left + x >= raster_x || top + y >= raster_y) {
            continue;
        }
        float norm = 0.0f;
        for (int dy = 0; dy < kPatch; ++dy) {
            norm += sums[y + dy][x];
        }
        const int64_t place = int64_t(top + y) * raster_x + left + x;
        even[place] = samples[y][x];
        odd[place] = samples[y][x + 1];
        norms[place] = -0.5f * norm;
    }
}

}  // namespace pp

using namespace pp;

// Tokens as they travel.
extern "C" __global__ void __launch_bounds__(256)
unfold(const __nv_bfloat16* __restrict__ tokens, uint8_t* __restrict__ scratch, const __grid_constant__ Geometry geometry,
       int32_t first_slot, int32_t slots) {
    write_scratch(tokens, scratch, geometry, first_slot, slots, kCentre);
}

// Tokens that a pass has left for the next one.
extern "C" __global__ void __launch_bounds__(256)
unfold_guides(const __nv_bfloat16* __restrict__ tokens, uint8_t* __restrict__ scratch,
              const __grid_constant__ Geometry geometry, int32_t first_slot, int32_t slots) {
    write_scratch(tokens, scratch, geometry, first_slot, slots, 0.0f);
}
