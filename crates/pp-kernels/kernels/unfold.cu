// Patch tokens to scratch frames (see geometry.cuh): rasters with a mirrored margin, and minus half the squared norm of
// the patch at every place, which the attention adds to the products of queries and keys.
//
// Samples are taken less 128, rounded to multiples of one half (those that encode makes are integers) and kept within
// -128..=128; NaN becomes -128. Norms are sums of 64 squares in f32, multiples of 1/4 up to 2^20: exact.
//
// Frame i goes to scratch slot (first_slot + i) % slots. Grid: (raster tiles of 64 x 64 of all planes, frames);
// block: 256.

#include "geometry.cuh"

namespace pp {

constexpr int kThreads = 256;
constexpr int kTileX = 64;
constexpr int kTileY = 64;
constexpr int kSideX = kTileX + 2 * kPatch;  // from one token before the tile on, so that whole token rows are read
constexpr int kSideY = kTileY + kPatch - 1;
constexpr int kRow = 16;  // sums that a thread makes along a row, and along a column
constexpr int kColumn = kTileX * kTileY / kThreads;

// A sample as the attention reads it.
__device__ inline uint32_t around_zero(uint32_t bits, float centre) {
    const float halves = rintf(2.0f * (__uint_as_float(bits << 16) - centre));
    return __float_as_uint(0.5f * fminf(fmaxf(halves, -2.0f * kCentre), 2.0f * kCentre)) >> 16;
}

// As `mirrored`, without its divisions where nothing is folded.
__device__ inline int inside(int i, int length) { return i >= 0 && i < length ? i : mirrored(i, length); }

// `centre` is what the tokens' samples lie around.
__device__ inline void write_scratch(const uint16_t* __restrict__ tokens, uint8_t* __restrict__ scratch,
                                     const Geometry& geometry, int32_t first_slot, int32_t slots, float centre) {
    int tile = blockIdx.x;
    int index = 0;
    int tiles_x;
    for (;; ++index) {
        const Plane& p = geometry.plane[index];
        tiles_x = (raster_width(p) + kTileX - 1) / kTileX;
        const int tiles = tiles_x * ((raster_height(p) + kTileY - 1) / kTileY);
        if (tile < tiles) {
            break;
        }
        tile -= tiles;
    }
    const int frame = blockIdx.y;
    const Plane plane = geometry.plane[index];
    const int raster_x = raster_width(plane);
    const int raster_y = raster_height(plane);
    const int left = tile % tiles_x * kTileX;
    const int top = tile / tiles_x * kTileY;
    // Column c holds sample left + c - 2 * kMargin of the plane, row r holds row top + r - kMargin.
    __shared__ uint4 pieces[kSideY][kSideX / 8 + 1];
    __shared__ float sums[kSideY][kTileX + 1];

    const int width = plane.tokens_x * kPatch;
    const int rows = plane.tokens_y * kPatch;
    tokens += (int64_t(frame) * geometry.tokens + plane.first_token) * kToken;
#pragma unroll
    for (int first = 0; first < kSideX / 8 * kSideY; first += kThreads) {
        const int i = first + threadIdx.x;
        if (i >= kSideX / 8 * kSideY) {
            break;
        }
        const int piece = i % (kSideX / 8);
        const int x = left + piece * 8 - 2 * kMargin;
        const int y = inside(top + i / (kSideX / 8) - kMargin, rows);
        const uint16_t* row = tokens + (y / kPatch * plane.tokens_x) * kToken + y % kPatch * kPatch;
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
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            words[k] = around_zero(words[k] & 0xFFFF, centre) | around_zero(words[k] >> 16, centre) << 16;
        }
        pieces[i / (kSideX / 8)][piece] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __syncthreads();

    uint8_t* out = scratch + (first_slot + frame) % slots * raster_offset(geometry, geometry.planes) +
                   raster_offset(geometry, index);
    const int area = raster_area(plane);
    uint16_t* even = reinterpret_cast<uint16_t*>(out);
    uint16_t* odd = even + area;
    float* norms = reinterpret_cast<float*>(odd + area);
    // Eight samples of a row at a time. Stores go out first: nothing waits for them.
#pragma unroll
    for (int first = 0; first < kTileX / 8 * kTileY; first += kThreads) {
        const int x = threadIdx.x % (kTileX / 8) * 8;
        const int y = (first + threadIdx.x) / (kTileX / 8);
        if (left + x < raster_x && top + y < raster_y) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(pieces[y]) + (x + kMargin) / 2;
            uint32_t words[5];
            for (int k = 0; k < 5; ++k) {
                words[k] = from[k];
            }
            const int place = (top + y) * raster_x + left + x;
            *reinterpret_cast<uint4*>(even + place) = make_uint4(words[0], words[1], words[2], words[3]);
            for (int k = 0; k < 4; ++k) {
                words[k] = words[k] >> 16 | words[k + 1] << 16;
            }
            *reinterpret_cast<uint4*>(odd + place) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

    // Sums along rows, each from the one before: exact, so that this adds up no error.
    for (int i = threadIdx.x; i < kTileX / kRow * kSideY; i += kThreads) {
        const int row = i % kSideY;
        const int first = i / kSideY * kRow;
        const uint2* from = reinterpret_cast<const uint2*>(reinterpret_cast<const uint16_t*>(pieces[row]) + first + kMargin);
        float squares[kRow + kPatch];
#pragma unroll
        for (int k = 0; k < (kRow + kPatch) / 4; ++k) {
            const uint2 two = from[k];
            const float a = __uint_as_float(two.x << 16), b = __uint_as_float(two.x & 0xFFFF0000u);
            const float c = __uint_as_float(two.y << 16), d = __uint_as_float(two.y & 0xFFFF0000u);
            squares[4 * k] = a * a, squares[4 * k + 1] = b * b, squares[4 * k + 2] = c * c, squares[4 * k + 3] = d * d;
        }
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kRow + kPatch - 1; ++k) {
            sum += squares[k];
            if (k >= kPatch) {
                sum -= squares[k - kPatch];
            }
            if (k >= kPatch - 1) {
                sums[row][first + k - kPatch + 1] = sum;
            }
        }
    }
    __syncthreads();

    // Sums along columns.
    const int x = threadIdx.x % kTileX;
    const int first = threadIdx.x / kTileX * kColumn;
    float sum = 0.0f;
    float column[kColumn + kPatch - 1];
#pragma unroll
    for (int k = 0; k < kColumn + kPatch - 1; ++k) {
        column[k] = sums[first + k][x];
    }
    float* place = norms + (top + first) * raster_x + left + x;
#pragma unroll
    for (int k = 0; k < kColumn + kPatch - 1; ++k) {
        sum += column[k];
        if (k >= kPatch) {
            sum -= column[k - kPatch];
        }
        const int y = top + first + k - kPatch + 1;
        if (k >= kPatch - 1 && left + x < raster_x && y < raster_y) {
            place[(k - kPatch + 1) * raster_x] = -0.5f * sum;
        }
    }
}

static_assert(kThreads % (kTileX / 8) == 0 && kThreads % kTileX == 0, "a thread keeps its column");

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
