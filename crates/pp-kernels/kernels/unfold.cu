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

constexpr int kThreads = 256;
constexpr int kTileX = 64;
constexpr int kTileY = 32;
constexpr int kSideX = kTileX + 2 * kPatch;  // from one token before the tile on, so that whole token rows are read
constexpr int kSideY = kTileY + kPatch - 1;

// A sample as the attention reads it.
__device__ inline uint32_t around_zero(uint32_t bits, float centre) {
    const float halves = rintf(2.0f * (__uint_as_float(bits << 16) - centre));
    return __float_as_uint(0.5f * fminf(fmaxf(halves, -2.0f * kCentre), 2.0f * kCentre)) >> 16;
}

// `centre` is what the tokens' samples lie around.
__device__ inline void write_scratch(const uint16_t* __restrict__ tokens, uint8_t* __restrict__ scratch,
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
    // Column c holds sample left + c - 2 * kMargin of the plane, row r holds row top + r - kMargin.
    __shared__ uint4 pieces[kSideY][kSideX / 8 + 1];
    __shared__ float sums[kSideY][kTileX];

    const int width = plane.tokens_x * kPatch;
    tokens += (int64_t(frame) * geometry.tokens + plane.first_token) * kToken;
    for (int i = threadIdx.x; i < kSideX / 8 * kSideY; i += kThreads) {
        const int piece = i % (kSideX / 8);
        const int x = left + piece * 8 - 2 * kMargin;
        const int y = mirrored(top + i / (kSideX / 8) - kMargin, plane.tokens_y * kPatch);
        const uint16_t* row = tokens + int64_t(y / kPatch * plane.tokens_x) * kToken + y % kPatch * kPatch;
        uint32_t words[4];
        if (x >= 0 && x < width) {
            const uint4 four = *reinterpret_cast<const uint4*>(row + x / kPatch * kToken);
            words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
        } else {
            for (int k = 0; k < 4; ++k) {
                const int low = mirrored(x + 2 * k, width);
                const int high = mirrored(x + 2 * k + 1, width);
                words[k] = row[low / kPatch * kToken + low % kPatch] | uint32_t(row[high / kPatch * kToken + high % kPatch]) << 16;
            }
        }
        for (int k = 0; k < 4; ++k) {
            words[k] = around_zero(words[k] & 0xFFFF, centre) | around_zero(words[k] >> 16, centre) << 16;
        }
        pieces[i / (kSideX / 8)][piece] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __syncthreads();

    // Sums along rows, each from the one before: exact, so that this adds up no error.
    for (int i = threadIdx.x; i < kTileX / 8 * kSideY; i += kThreads) {
        const int first = i % (kTileX / 8) * 8;
        const __nv_bfloat16* samples = reinterpret_cast<const __nv_bfloat16*>(pieces[i / (kTileX / 8)]) + first + kMargin;
        float squares[2 * kPatch - 1];
        float sum = 0.0f;
        for (int k = 0; k < 2 * kPatch - 1; ++k) {
            squares[k] = __bfloat162float(samples[k]) * __bfloat162float(samples[k]);
            sum += squares[k];
            if (k >= kPatch) {
                sum -= squares[k - kPatch];
            }
            if (k >= kPatch - 1) {
                sums[i / (kTileX / 8)][first + k - kPatch + 1] = sum;
            }
        }
    }
    __syncthreads();

    uint8_t* out = scratch + (first_slot + frame) % slots * raster_offset(geometry, geometry.planes) +
                   raster_offset(geometry, index);
    const int64_t area = raster_area(plane);
    uint16_t* even = reinterpret_cast<uint16_t*>(out);
    uint16_t* odd = even + area;
    float* norms = reinterpret_cast<float*>(odd + area);
    // Eight samples of a row for each thread.
    {
        const int x = threadIdx.x % (kTileX / 8) * 8;
        const int y = threadIdx.x / (kTileX / 8);
        if (left + x < raster_x && top + y < raster_y) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(pieces[y]) + (x + kMargin) / 2;
            uint32_t words[5];
            for (int k = 0; k < 5; ++k) {
                words[k] = from[k];
            }
            const int64_t place = int64_t(top + y) * raster_x + left + x;
            *reinterpret_cast<uint4*>(even + place) = make_uint4(words[0], words[1], words[2], words[3]);
            for (int k = 0; k < 4; ++k) {
                words[k] = words[k] >> 16 | words[k + 1] << 16;
            }
            *reinterpret_cast<uint4*>(odd + place) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    // Eight rows of a column for each thread.
    const int x = threadIdx.x % kTileX;
    const int first = threadIdx.x / kTileX * 8;
    float sum = 0.0f;
    for (int k = 0; k < 2 * kPatch - 1; ++k) {
        sum += sums[first + k][x];
        if (k >= kPatch) {
            sum -= sums[first + k - kPatch][x];
        }
        const int y = top + first + k - kPatch + 1;
        if (k >= kPatch - 1 && left + x < raster_x && y < raster_y) {
            norms[int64_t(y) * raster_x + left + x] = -0.5f * sum;
        }
    }
}

static_assert(kTileX / 8 * kTileY == kThreads && kTileX * kTileY / 8 == kThreads, "work for each thread");

}  // namespace pp

using namespace pp;

// Tokens as they travel.
extern "C" __global__ void __launch_bounds__(256)
unfold(const uint16_t* __restrict__ tokens, uint8_t* __restrict__ scratch, const __grid_constant__ Geometry geometry,
       int32_t first_slot, int32_t slots) {
    write_scratch(tokens, scratch, geometry, first_slot, slots, kCentre);
}

// Tokens that a pass has left for the next one.
extern "C" __global__ void __launch_bounds__(256)
unfold_guides(const uint16_t* __restrict__ tokens, uint8_t* __restrict__ scratch,
              const __grid_constant__ Geometry geometry, int32_t first_slot, int32_t slots) {
    write_scratch(tokens, scratch, geometry, first_slot, slots, 0.0f);
}
