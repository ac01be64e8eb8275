// Phase B: one pass of windowed patch attention over the frames of a chunk. The formula stands in src/reference.rs.
//
// A warp works on 16 queries, the rows of its matrix products: four neighbouring patches in a row, in FRAMES frames and
// 4 / FRAMES rows of patches. Queries that lie close to each other share keys, in space and in time. Keys come in blocks
// of 2 rows of 8 places. For each block:
//
//     S[16 x 16]  = Q[16 x 64] K^T + norms       8 x mma.m16n8k16    (bf16 in, f32 out)
//     P           = exp2(min(S * c + f, b))      masked outside each query's own window
//     O[16 x 64] += P V, O'[16] += P 1           9 x mma.m16n8k16
//
// Keys and values are never unfolded. The patch at place (x, y) is samples (x + i, y + j), so the same word, the pair of
// samples at (x0 + g + 2j, y), is what thread (g, j) needs of the key at x0 + g in the product with Q, and of the keys
// at x0 + 2j and x0 + 2j + 1 in the product with P. Nine words, one for each row, feed all 17 products, and going two
// rows down needs two new ones.
//
// No maximum is needed: no logit is above the bias, and every query meets itself with a distance of exactly zero.
// S holds minus half the squared distance; sums are exact where samples are multiples of one half (see docs/kernels.md).
// Overlapping patches meet in shared memory, numerators and denominators, in an order that does not depend on timing.

#include "geometry.cuh"

using namespace pp;

// One pass. Plain fields, C layout, 160 bytes; pointers are device addresses.
struct Attend {
    const uint8_t* values;  // scratch frames of the noisy samples: chunk and context, a ring
    const uint8_t* guides;  // scratch frames of the chunk's guides; not read in the first pass
    __nv_bfloat16* out;     // tokens: the result after the last pass, else the next pass's guide
    const float* sigma;     // noise of each plane
    const int64_t* step;    // strength of this pass in thousandths
    float noise_scale;
    float bias;                 // logit of keys in context frames
    int32_t frames;             // in the chunk
    int32_t context;            // frames in front of the chunk that are known, 0 to 2
    int32_t context_at[2];      // their numbers less that of the chunk's first frame, older first
    int32_t slots;              // scratch frames in the ring
    int32_t first_slot;         // of the chunk's first frame; context lies in the slots before it
    int32_t last;               // whether this is the last pass
    int32_t reserved;
    Geometry geometry;
};

namespace {

constexpr float kKeep = 0.5f;         // settings.rs: KEEP
constexpr float kFloor = 1.1f;        // settings.rs: FLOOR
constexpr float kMinH2 = 1e-6f;       // denoise.rs: MIN_H2
constexpr int kRadius = 4;            // settings.rs: RADIUS[0]
constexpr int kRadiusFar = 2;         // settings.rs: RADIUS[1], RADIUS[2]
constexpr int kReach = 2;             // settings.rs: CONTEXT_FRAMES
constexpr float kLog2e = 1.44269504f;
constexpr float kShut = -1e30f;       // in place of a norm: weight zero

constexpr int kWarps = 8;
constexpr int kTileX = 16;            // patches of a block
constexpr int kTileY = 8;
constexpr int kCell = 4;              // patches begin at multiples of this
constexpr int kSamplesX = (kTileX + 1) * kCell;
constexpr int kSamplesY = (kTileY + 1) * kCell;

__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline uint32_t pack(float low, float high) {
    uint32_t two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

// A scratch plane of one frame.
struct Raster {
    const uint8_t* data;
    int width;
    int64_t area;

    // The pair of samples at (x, y) and (x + 1, y).
    __device__ const uint32_t* pair(int x, int y) const {
        const int64_t place = (x & 1) * area + int64_t(y + kMargin) * width + (x + kMargin) - (x & 1);
        return reinterpret_cast<const uint32_t*>(data + 2 * place);
    }
    // Minus half the squared norms of the patches at (x, y).
    __device__ const float* norm(int x, int y) const {
        return reinterpret_cast<const float*>(data + 4 * area) + int64_t(y + kMargin) * width + x + kMargin;
    }
    __device__ float sample(int x, int y) const {
        return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(data)[int64_t(y + kMargin) * width + x + kMargin]);
    }
};

// Sums of one block: overlapping patches meet here.
template <int FRAMES>
struct Sums {
    float numerator[FRAMES][kSamplesY][kSamplesX];
    float denominator[FRAMES][kTileY + 1][kTileX + 1];
};

template <int FRAMES, bool FIRST>
__device__ void attend(const Attend& args) {
    constexpr int ROWS = 4 / FRAMES;  // rows of patches of a warp
    extern __shared__ __align__(16) uint8_t shared[];
    Sums<FRAMES>& sums = *reinterpret_cast<Sums<FRAMES>*>(shared);
    const Geometry& geometry = args.geometry;

    // Which plane, which tile of it, which frames.
    int tile = blockIdx.x;
    int index = 0;
    int tiles_x;
    for (;; ++index) {
        const Plane& p = geometry.plane[index];
        tiles_x = max(1, (2 * p.tokens_x - 2 + kTileX - 2) / (kTileX - 1));
        const int tiles_y = max(1, (2 * p.tokens_y - 2 + kTileY - 2) / (kTileY - 1));
        if (tile < tiles_x * tiles_y) {
            break;
        }
        tile -= tiles_x * tiles_y;
    }
    const Plane plane = geometry.plane[index];
    const int patches_x = 2 * plane.tokens_x - 1;
    const int patches_y = 2 * plane.tokens_y - 1;
    const int tile_x = tile % tiles_x * (kTileX - 1);  // first patch
    const int tile_y = tile / tiles_x * (kTileY - 1);
    const int first_frame = blockIdx.y * FRAMES;

    const int64_t frame_bytes = raster_offset(geometry, geometry.planes);
    const int64_t plane_offset = raster_offset(geometry, index);
    const int width = raster_width(plane);
    const int64_t area = raster_area(plane);
    auto values_of = [&](int frame) {
        const int slot = (args.first_slot + frame + args.slots) % args.slots;
        return Raster{args.values + slot * frame_bytes + plane_offset, width, area};
    };
    auto guides_of = [&](int frame) {
        return FIRST || frame < 0 ? values_of(frame) : Raster{args.guides + frame * frame_bytes + plane_offset, width, area};
    };

    for (int i = threadIdx.x; i < int(sizeof(sums) / 4); i += kWarps * 32) {
        reinterpret_cast<float*>(&sums)[i] = 0.0f;
    }

    // Logit = b - max(distance - floor, 0) / (64 h^2), in units of log 2, from S = -distance / 2. The larger of the two
    // biases is taken off both, which changes nothing but keeps weights at most 1.
    const float sigma = args.sigma[index] * args.noise_scale;
    const float strength = fminf(fmaxf(float(*args.step) / 1000.0f, 0.001f), 10.0f);
    const float h2 = fmaxf(strength * sigma * (strength * sigma), kMinH2);
    const float scale = kLog2e / (float(kToken) * h2);
    const float unit = float(kToken) * kFloor * sigma * sigma * scale;  // the floor of a variance of 1, scaled
    const float bias = fminf(fmaxf(args.bias, -80.0f), 80.0f);

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int j = lane % 4;

    constexpr int STRIPS_X = kTileX / 4;
    constexpr int STRIPS = STRIPS_X * kTileY / ROWS;
    for (int strip = warp; strip < STRIPS; strip += kWarps) {
        const int strip_x = strip % STRIPS_X * 4;  // in the tile
        const int strip_y = strip / STRIPS_X * ROWS;
        const int left = (tile_x + strip_x) * kCell;  // corner of the first patch
        const int top = (tile_y + strip_y) * kCell;
        const bool any = tile_x + strip_x < patches_x && tile_y + strip_y < patches_y;

        // The thread's two queries are rows g and g + 8: patch column g % 4 of frame and row `part`.
        int frame[2], patch_y[2];
        bool valid[2];
        const int patch_x = g % 4;
        float query_norm[2];
        uint32_t query[4][4];
        float out[8][4];
        float total[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                out[i][e] = 0.0f;
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            total[e] = 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int part = g / 4 + 2 * half;
            frame[half] = first_frame + part % FRAMES;
            patch_y[half] = part / FRAMES;
            valid[half] = tile_x + strip_x + patch_x < patches_x && tile_y + strip_y + patch_y[half] < patches_y &&
                          frame[half] < args.frames;
            // Queries that do not exist read those of a neighbour and see no key.
            const int px = min(tile_x + strip_x + patch_x, patches_x - 1) * kCell;
            const int py = min(tile_y + strip_y + patch_y[half], patches_y - 1) * kCell;
            const Raster own = guides_of(min(frame[half], args.frames - 1));
            query_norm[half] = *own.norm(px, py);
            const uint32_t* words = own.pair(px + 2 * j, py);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                query[k][half] = words[(2 * k) * (width / 2)];
                query[k][half + 2] = words[(2 * k + 1) * (width / 2)];
            }
        }

        const int first_key = max(0, first_frame - kReach);
        const int last_key = min(args.frames - 1, first_frame + FRAMES - 1 + kReach);
        const int key_count = any ? args.context + last_key - first_key + 1 : 0;
        for (int number = 0; number < key_count; ++number) {
            const int key = number < args.context ? number - args.context : first_key + number - args.context;
            const bool of_chunk = key >= 0;
            const int at = of_chunk ? key : args.context_at[key + 2];
            int reach = -1;  // radius of this frame's window, the same for all threads
            int radius[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int far = abs(frame[half] - at);
                radius[half] = !valid[half] || far > kReach ? -1 : far == 0 ? kRadius : kRadiusFar;
            }
            for (int f = 0; f < FRAMES; ++f) {
                const int far = abs(first_frame + f - at);
                if (first_frame + f < args.frames && far <= kReach) {
                    reach = max(reach, far == 0 ? kRadius : kRadiusFar);
                }
            }
            if (reach < 0) {
                continue;
            }
            const float variance = FIRST ? 2.0f : kKeep * kKeep + (of_chunk ? kKeep * kKeep : 1.0f);
            const float top_logit = kLog2e * (of_chunk ? fminf(-bias, 0.0f) : fminf(bias, 0.0f));
            const float offset = unit * variance + top_logit;
            const Raster keys = guides_of(key);
            const Raster values = values_of(key);
            const int low = top - reach;
            const int blocks = (kCell * (ROWS - 1) + 2 * reach + 2) / 2;
            const int stride = width / 2;

            // Windows of all queries together are 21 (17) places wide: three groups of eight.
            for (int group = 0; group < 3; ++group) {
                const int x = left - kRadius + 8 * group;
                bool inside[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int dx = x + 2 * j + (e & 1) - (left + patch_x * kCell);
                    inside[e] = abs(dx) <= radius[e >> 1];
                }
                const uint32_t* key_words = keys.pair(x + g + 2 * j, low);
                const uint32_t* value_words = values.pair(x + g + 2 * j, low);
                const float* norms = keys.norm(x + 2 * j, low);
                uint32_t k[9], v[9];
#pragma unroll
                for (int i = 0; i < 9; ++i) {
                    k[i] = key_words[i * stride];
                    v[i] = FIRST ? k[i] : value_words[i * stride];
                }
                float2 norm[2];
                norm[0] = *reinterpret_cast<const float2*>(norms);
                norm[1] = *reinterpret_cast<const float2*>(norms + width);
#pragma unroll 1
                for (int block = 0; block < blocks; ++block) {
                    // What the next block needs is under way while this one is computed.
                    key_words += 2 * stride;
                    value_words += 2 * stride;
                    norms += 2 * width;
                    uint32_t next_k[2], next_v[2];
                    float2 next_norm[2];
                    const bool more = block + 1 < blocks;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        next_k[i] = more ? key_words[(7 + i) * stride] : 0;
                        next_v[i] = FIRST ? next_k[i] : more ? value_words[(7 + i) * stride] : 0;
                        next_norm[i] = more ? *reinterpret_cast<const float2*>(norms + i * width) : make_float2(0, 0);
                    }

                    float s[2][4];
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        const int dy = 2 * block + row - reach;
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const bool seen = abs(dy - patch_y[half] * kCell) <= radius[half];
                            s[row][2 * half] = seen && inside[2 * half] ? norm[row].x : kShut;
                            s[row][2 * half + 1] = seen && inside[2 * half + 1] ? norm[row].y : kShut;
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        mma(s[0], query[i], k[2 * i], k[2 * i + 1]);
                        mma(s[1], query[i], k[2 * i + 1], k[2 * i + 2]);
                    }
                    uint32_t p[4];
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        float w[4];
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const float half_distance = s[row][e] + query_norm[e >> 1];
                            w[e] = exp2_fast(fminf(fmaf(half_distance, 2.0f * scale, offset), top_logit));
                        }
                        p[2 * row] = pack(w[0], w[1]);
                        p[2 * row + 1] = pack(w[2], w[3]);
                    }
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        mma(out[i], p, v[i], v[i + 1]);
                    }
                    mma(total, p, 0x3F803F80u, 0x3F803F80u);

#pragma unroll
                    for (int i = 0; i < 7; ++i) {
                        k[i] = k[i + 2];
                        v[i] = v[i + 2];
                    }
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        k[7 + i] = next_k[i];
                        v[7 + i] = next_v[i];
                        norm[i] = next_norm[i];
                    }
                }
            }
        }

        // Patches of equal parity in both directions do not overlap, so four steps add them up without a race.
#pragma unroll 1
        for (int parity = 0; parity < 4; ++parity) {
            __syncthreads();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int x = strip_x + patch_x;
                const int y = strip_y + patch_y[half];
                if (!valid[half] || (x & 1) != (parity & 1) || (y & 1) != parity >> 1) {
                    continue;
                }
                const int f = frame[half] - first_frame;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float2* place = reinterpret_cast<float2*>(&sums.numerator[f][y * kCell + i][x * kCell + 2 * j]);
                    float2 sum = *place;
                    sum.x += out[i][2 * half];
                    sum.y += out[i][2 * half + 1];
                    *place = sum;
                }
                sums.denominator[f][y + (j >> 1)][x + (j & 1)] += total[2 * half];
            }
        }
    }
    __syncthreads();

    // A cell is complete where all patches that cover it belong to this tile: all but the first and last ones, unless
    // there the plane ends. One thread for each row of a cell.
    constexpr int LINES = FRAMES * kSamplesY * (kTileX + 1);
    for (int i = threadIdx.x; i < LINES; i += kWarps * 32) {
        const int cell_x = i % (kTileX + 1);
        const int y = i / (kTileX + 1) % kSamplesY;
        const int cell_y = y / kCell;
        const int f = i / (kTileX + 1) / kSamplesY;
        const int at_x = tile_x + cell_x;
        const int at_y = tile_y + cell_y;
        const bool complete_x = (cell_x > 0 || at_x == 0) && (cell_x < kTileX || at_x == patches_x) && at_x <= patches_x;
        const bool complete_y = (cell_y > 0 || at_y == 0) && (cell_y < kTileY || at_y == patches_y) && at_y <= patches_y;
        if (!complete_x || !complete_y || first_frame + f >= args.frames) {
            continue;
        }
        const float denominator = sums.denominator[f][cell_y][cell_x];
        const Raster noisy = values_of(first_frame + f);
        const int x = at_x * kCell;
        const int line = tile_y * kCell + y;
        float result[kCell];
#pragma unroll
        for (int e = 0; e < kCell; ++e) {
            const float own = noisy.sample(x + e, line);
            // Samples of phase B's input that are not multiples of one half can be far from themselves where there is no
            // noise at all; they then stay as they are.
            const float estimate = denominator > 0.0f ? sums.numerator[f][y][cell_x * kCell + e] / denominator : own;
            // Guides are multiples of one half, so that distances stay exact.
            result[e] = args.last ? estimate : rintf(2.0f * (estimate + kKeep * (own - estimate))) * 0.5f;
        }
        const int64_t token = int64_t(first_frame + f) * geometry.tokens + plane.first_token + line / kPatch * plane.tokens_x +
                              x / kPatch;
        uint2* place = reinterpret_cast<uint2*>(args.out + token * kToken + line % kPatch * kPatch + x % kPatch);
        *place = make_uint2(pack(result[0], result[1]), pack(result[2], result[3]));
    }
}

}  // namespace

// One kernel for each number of frames that a block takes together, and for the first pass and the others.
// Grid: (tiles of all planes, ceil(frames / FRAMES)); block: 256; dynamic shared memory: sizeof(Sums<FRAMES>).
#define PP_ATTEND(name, frames, first)                                                                  \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, 2) name(const __grid_constant__ Attend args) { \
        attend<frames, first>(args);                                                                    \
    }

PP_ATTEND(attend_first_1, 1, true)
PP_ATTEND(attend_first_2, 2, true)
PP_ATTEND(attend_first_4, 4, true)
PP_ATTEND(attend_next_1, 1, false)
PP_ATTEND(attend_next_2, 2, false)
PP_ATTEND(attend_next_4, 4, false)
