// Frames of 8-bit samples to patch tokens in bf16: one thread for each row of eight samples of a token.
//
// Samples up to 255 have at most 8 significant bits, as many as bf16, so nothing is lost. Planes are padded by repeating
// the last column and the last row. Bound by memory: one byte read and two written for each sample.

#include "geometry.cuh"

using namespace pp;

extern "C" __global__ void __launch_bounds__(256)
encode(const uint8_t* __restrict__ frames, uint64_t frame_stride, uint4* __restrict__ tokens, const __grid_constant__ Geometry geometry,
       int32_t frame_count) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= int64_t(frame_count) * geometry.tokens * kPatch) {
        return;
    }
    // Neighbouring threads take neighbouring rows of one token, so that what they write is contiguous.
    const int dy = int(row % kPatch);
    const int64_t index = row / kPatch;
    const int token = int(index % geometry.tokens);
    const Plane plane = geometry.plane[plane_of(geometry, token)];
    const int x = (token - plane.first_token) % plane.tokens_x * kPatch;
    const int y = (token - plane.first_token) / plane.tokens_x * kPatch + dy;
    const uint8_t* line = frames + index / geometry.tokens * frame_stride + plane.offset +
                          int64_t(min(y, plane.height - 1)) * plane.width;
    uint8_t samples[kPatch];
    if (x + kPatch <= plane.width && (reinterpret_cast<uintptr_t>(line + x) & 7) == 0) {
        *reinterpret_cast<uint2*>(samples) = *reinterpret_cast<const uint2*>(line + x);
    } else {
        for (int i = 0; i < kPatch; ++i) {
            samples[i] = line[min(x + i, plane.width - 1)];
        }
    }
    uint32_t words[kPatch / 2];
    for (int i = 0; i < kPatch / 2; ++i) {
        // The upper half of an f32 is its bf16, and the lower half of a small integer's is zero.
        words[i] = __float_as_uint(float(samples[2 * i])) >> 16 | __float_as_uint(float(samples[2 * i + 1]));
    }
    tokens[row] = make_uint4(words[0], words[1], words[2], words[3]);
}
