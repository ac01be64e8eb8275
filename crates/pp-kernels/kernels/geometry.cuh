// Sizes of frames, planes and scratch planes: what every kernel derives its addresses from.
//
// The host fills these structures (plain 32-bit fields, C layout) and passes them by value.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

namespace pp {

// Side of a patch token, and its elements.
constexpr int kPatch = 8;
constexpr int kToken = kPatch * kPatch;

// One plane of a frame.
struct Plane {
    int32_t width;        // samples in a row, without padding
    int32_t height;       // rows, without padding
    int32_t tokens_x;     // ceil(width / 8)
    int32_t tokens_y;     // ceil(height / 8)
    int32_t first_token;  // index of the plane's first token in the frame
    int32_t offset;       // where the plane begins in a packed frame of 8-bit samples, in bytes
};

// A frame; planes that are not there are all zero.
struct Geometry {
    int32_t planes;
    int32_t tokens;  // of a frame
    Plane plane[3];
};

// A scratch frame holds, plane after plane, what the attention reads: the padded plane as raster with a mirrored margin,
// the same shifted left by one sample (so that a pair of neighbours at any place is one aligned word), and for every
// place minus half the squared norm of the 8x8 patch whose corner is there. Samples lie around zero: bf16 then holds
// every multiple of one half.
constexpr float kCentre = 128.0f;
constexpr int kMargin = 4;      // on the left and the top: the largest offset of a key
constexpr int kOverrun = 20;    // on the right and the bottom: the same, and what tiles read without using it
constexpr int kBytesPerSample = 2 + 2 + 4;

__host__ __device__ inline int raster_width(const Plane& plane) { return plane.tokens_x * kPatch + kMargin + kOverrun; }
__host__ __device__ inline int raster_height(const Plane& plane) { return plane.tokens_y * kPatch + kMargin + kOverrun; }
__host__ __device__ inline int raster_area(const Plane& plane) { return raster_width(plane) * raster_height(plane); }

// Bytes of scratch in front of a plane; with index `planes`, those of the whole scratch frame.
__host__ __device__ inline int64_t raster_offset(const Geometry& geometry, int index) {
    int64_t bytes = 0;
    for (int i = 0; i < index; ++i) {
        bytes += int64_t(kBytesPerSample) * raster_area(geometry.plane[i]);
    }
    return bytes;
}

// Which plane a token of a frame lies in.
__device__ inline int plane_of(const Geometry& geometry, int token) {
    int index = 0;
    while (index + 1 < geometry.planes && token >= geometry.plane[index + 1].first_token) {
        ++index;
    }
    return index;
}

// The index inside 0..length that stands for `i`: the edge sample is repeated, and folded as often as needed.
__device__ inline int mirrored(int i, int length) {
    int folded = i % (2 * length);
    folded += folded < 0 ? 2 * length : 0;
    return min(folded, 2 * length - 1 - folded);
}

}  // namespace pp
