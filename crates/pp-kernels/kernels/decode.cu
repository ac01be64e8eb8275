// Patch tokens in bf16 to frames of 8-bit samples: one thread for each row of eight samples of a token.
//
// A sample is rounded to the nearest (ties up) and clamped to 0..=255; NaN becomes 0. Bound by memory: two bytes read
// and one written for each sample.

#include "geometry.cuh"

using namespace pp;

__device__ inline uint32_t to_sample(uint32_t bits) {
    // A conversion saturates at both ends of u32, and turns NaN into 0.
    return min(__float2uint_rz(__uint_as_float(bits) + 0.5f), 255u);
}

extern "C" __global__ void __launch_bounds__(256)
decode(const uint4* __restrict__ tokens, uint8_t* __restrict__ frames, uint64_t frame_stride, const __grid_constant__ Geometry geometry,
       int32_t frame_count) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= int64_t(frame_count) * geometry.tokens * kPatch) {
        return;
    }
    const int dy = int(row % kPatch);
    const int64_t index = row / kPatch;
    const int token = int(index % geometry.tokens);
    const Plane plane = geometry.plane[plane_of(geometry, token)];
    const int x = (token - plane.first_token) % plane.tokens_x * kPatch;
    const int y = (token - plane.first_token) / plane.tokens_x * kPatch + dy;
    if (y >= plane.height) {
        return;
    }
    const uint4 four = tokens[row];
    const uint32_t words[kPatch / 2] = {four.x, four.y, four.z, four.w};
    uint8_t samples[kPatch];
    for (int i = 0; i < kPatch / 2; ++i) {
        samples[2 * i] = uint8_t(to_sample(words[i] << 16));
        samples[2 * i + 1] = uint8_t(to_sample(words[i] & 0xFFFF0000u));
    }
    uint8_t* line = frames + index / geometry.tokens * frame_stride + plane.offset + int64_t(y) * plane.width;
    if (x + kPatch <= plane.width && (reinterpret_cast<uintptr_t>(line + x) & 7) == 0) {
        *reinterpret_cast<uint2*>(line + x) = *reinterpret_cast<const uint2*>(samples);
    } else {
        for (int i = 0; i < kPatch && x + i < plane.width; ++i) {
            line[x + i] = samples[i];
        }
    }
}
