// Phase B: one pass of windowed patch attention over the frames of a chunk. The formula stands in src/reference.rs.
//
// A warp works on 16 queries, the rows of its matrix products: four neighbouring patches in a row, in FRAMES frames and
// 4 / FRAMES rows of patches. Queries that lie close to each other share keys, in space and in time. Keys come in blocks
// of 2 rows of 8 places. For each block:
//
//     S[16 x 16]  = Q[16 x 64] K^T + norms       8 x mma.m16n8k16    (bf16 in, f32 out)
//     P           = min(exp2(S * c + f), b)      zero outside each query's own window
//     O[16 x 64] += P V, O'[16] += P 1           9 x mma.m16n8k16
//
// Keys and values are never unfolded. The patch at place (x, y) is samples (x + i, y + j), so the same word, the pair of
// samples at (x0 + g + 2j, y), is what thread (g, j) needs of the key at x0 + g in the product with Q, and of the keys
// at x0 + 2j and x0 + 2j + 1 in the product with P. Nine words, one for each row, feed all 17 products, and going two
// rows down needs two new ones.
//
// S holds minus half the squared distance, exactly: scratch frames hold multiples of one half within -128..128, of which
// all products, norms and partial sums are multiples of 1/8 up to 2^20. So every query meets itself with a logit of
// exactly the bias, which is the largest there is, and no maximum has to be looked for.
//
// The warps of a block go through the key frames together: while they compute with one, the next one is copied into
// shared memory. Overlapping patches meet there too, numerators and denominators, in an order that does not depend on
// timing.

#include "geometry.cuh"

namespace pp {

// One pass. Plain fields, C layout, 160 bytes; pointers are device addresses.
struct Attend {
    const uint8_t* values;  // scratch frames of the noisy samples: chunk and context, a ring
    const uint8_t* guides;  // scratch frames of the chunk's guides; not read in the first pass
    __nv_bfloat16* out;     // tokens: the result after the last pass, else the next pass's guide less 128
    const float* sigma;     // noise of each plane
    const int64_t* step;    // strength of this pass in thousandths
    float noise_scale;
    float bias;             // logit of keys in context frames
    int32_t frames;         // in the chunk
    int32_t context;        // frames in front of the chunk that are known, 0 to 2
    int32_t context_at[2];  // their numbers less that of the chunk's first frame, older first
    int32_t slots;          // scratch frames in the ring
    int32_t first_slot;     // of the chunk's first frame; context lies in the slots before it
    int32_t last;           // whether this is the last pass
    int32_t reserved;
    Geometry geometry;
};

// No unnamed namespace: the names in it depend on where the file lies.

constexpr float kKeep = 0.5f;    // settings.rs: KEEP
constexpr float kFloor = 1.1f;   // settings.rs: FLOOR
constexpr float kMinH2 = 1e-6f;  // denoise.rs: MIN_H2
constexpr int kRadius = 4;       // settings.rs: RADIUS[0]
constexpr int kRadiusFar = 2;    // settings.rs: RADIUS[1], RADIUS[2]
constexpr int kReach = 2;        // settings.rs: CONTEXT_FRAMES
constexpr float kLog2e = 1.44269504f;
constexpr float kShut = -1e30f;  // in place of a norm: weight zero

constexpr int kTileX = 16;  // patches of a block
constexpr int kTileY = 24;
constexpr int kStripsX = kTileX / 4;
constexpr int kStripsY = 3;  // rows of strips that the warps work on together
constexpr int kThreads = kStripsX * kStripsY * 32;
constexpr int kCell = 4;    // patches begin at multiples of this
constexpr int kSamplesX = (kTileX + 1) * kCell;
constexpr int kSamplesY = (kTileY + 1) * kCell;

// Overlapping patches meet here.
template <int FRAMES>
struct Sums {
    float numerator[FRAMES][kSamplesY][kSamplesX];
    float denominator[FRAMES][kTileY + 1][kTileX + 1];
};

// The part of one key frame that the warps of a block read in one round: that of a strip for each.
template <int FRAMES, bool FIRST>
struct Keys {
    static constexpr int ROWS = 4 / FRAMES;         // rows of patches of a strip
    static constexpr int WIDTH = 88;                // samples: 83 are read, and whole 16-byte pieces are copied
    static constexpr int HEIGHT = kStripsY * kCell * ROWS + 13;  // rows of samples that are read
    static constexpr int PLACES = kStripsY * kCell * ROWS + 6;   // rows of places of keys
    static constexpr int PITCH = WIDTH / 2;                      // words
    // Even and odd words of one load lie in different banks.
    static constexpr int COPY = (HEIGHT * PITCH + 15) / 32 * 32 + 16;
    static_assert(COPY >= HEIGHT * PITCH, "room for all rows");

    uint32_t keys[2][COPY];
    uint32_t values[FIRST ? 1 : 2][FIRST ? 4 : COPY];
    float norms[PLACES * WIDTH];
};

template <int FRAMES, bool FIRST>
struct Shared {
    Keys<FRAMES, FIRST> keys[2];
    Sums<FRAMES> sums;
};

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

// The smaller of each of two bf16.
__device__ inline uint32_t smaller(uint32_t a, uint32_t b) {
    uint32_t two;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(two) : "r"(a), "r"(b));
    return two;
}

// Copies 16 bytes from global to shared memory, or zeroes where there is nothing to copy.
__device__ inline void copy_async(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

// A scratch plane of one frame.
struct Raster {
    const uint8_t* data;
    int width;
    int height;

    __device__ int64_t area() const { return int64_t(width) * height; }
    __device__ int64_t place(int x, int y) const { return int64_t(y + kMargin) * width + x + kMargin; }
    __device__ const __nv_bfloat16* samples() const { return reinterpret_cast<const __nv_bfloat16*>(data); }
    // Minus half the squared norms of the patches at each place.
    __device__ const float* norms() const { return reinterpret_cast<const float*>(data + 4 * area()); }
};

// Starts the copy of a key frame's part whose first sample is number `left` of line `top`; both frames are as large.
template <int FRAMES, bool FIRST>
__device__ inline void copy_keys(Keys<FRAMES, FIRST>& to, const Raster& guide, const Raster& noisy, int left, int top) {
    using Layout = Keys<FRAMES, FIRST>;
    constexpr int PIECES = Layout::WIDTH / 8;  // of 16 bytes, in a line of samples
    constexpr int COUNT = Layout::HEIGHT * PIECES;
    const int64_t area = guide.area();
#pragma unroll
    for (int first = 0; first < COUNT; first += kThreads) {
        const int i = first + threadIdx.x;
        const int x = left + i % PIECES * 8;
        const int y = top + i / PIECES;
        const bool there = x < guide.width && y < guide.height;
        const int64_t place = there ? y * guide.width + x : 0;
        if (i < COUNT) {
            copy_async(to.keys[0] + 4 * i, guide.samples() + place, there);
            copy_async(to.keys[1] + 4 * i, guide.samples() + area + place, there);
            if (!FIRST) {
                copy_async(to.values[0] + 4 * i, noisy.samples() + place, there);
                copy_async(to.values[1] + 4 * i, noisy.samples() + area + place, there);
            }
        }
    }
    constexpr int NORMS = Layout::PLACES * 2 * PIECES;
#pragma unroll
    for (int first = 0; first < NORMS; first += kThreads) {
        const int i = first + threadIdx.x;
        const int x = left + i % (2 * PIECES) * 4;
        const int y = top + i / (2 * PIECES);
        const bool there = x < guide.width && y < guide.height;
        if (i < NORMS) {
            copy_async(to.norms + 4 * i, guide.norms() + (there ? y * guide.width + x : 0), there);
        }
    }
}

// What a thread knows of its two queries, rows g and g + 8 of the warp's products.
struct Queries {
    uint32_t words[4][4];  // A fragments: two rows of the patches each
    float norm[2];
    int row[2];     // of patches, in the strip
    int radius[2];  // of the window in this key frame, -1: sees nothing
};

// How S becomes a weight: 2^(S * scale + offset), but no more than `most`, which is there twice.
struct Logit {
    float scale;
    float offset;
    uint32_t most;
};

struct Result {
    float out[8][4];
    float total[4];
};

// All keys of one key frame for one warp. `corner` is the sample (x - kRadius, y - kRadius) of the strip's first patch.
template <int FRAMES, bool FIRST, int REACH>
__device__ inline void attend_to(const Keys<FRAMES, FIRST>& keys, int corner_x, int corner_y, const Queries& queries,
                                 const Logit& logit, Result& result) {
    using Layout = Keys<FRAMES, FIRST>;
    constexpr int ROWS = Layout::ROWS;
    constexpr int BLOCKS = (kCell * (ROWS - 1) + 2 * REACH + 2) / 2;
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int j = lane % 4;
    const int y = corner_y + kRadius - REACH;

    // Windows of all queries together are 21 (17) places wide: three groups of eight.
#pragma unroll 1
    for (int group = 0; group < 3; ++group) {
        const int x = corner_x + 8 * group;
        const uint32_t* key_words = keys.keys[g & 1] + y * Layout::PITCH + (x + (g & ~1)) / 2 + j;
        const uint32_t* value_words = keys.values[FIRST ? 0 : g & 1] + (FIRST ? 0 : y * Layout::PITCH + (x + (g & ~1)) / 2 + j);
        const float* norms = keys.norms + y * Layout::WIDTH + x + 2 * j;

        // Norms of the queries, or what shuts a key out that lies outside the window; for rows near and far.
        float near[4], far[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int dx = 8 * group - kRadius + 2 * j + (e & 1) - g % 4 * kCell;
            const bool seen = abs(dx) <= queries.radius[e >> 1];
            near[e] = seen ? queries.norm[e >> 1] : kShut;
            far[e] = seen && queries.radius[e >> 1] > kRadiusFar ? queries.norm[e >> 1] : kShut;
        }
        uint32_t k[9], v[9];
#pragma unroll
        for (int i = 0; i < 7; ++i) {
            k[i] = key_words[i * Layout::PITCH];
            v[i] = FIRST ? k[i] : value_words[i * Layout::PITCH];
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int i = 7; i < 9; ++i) {
                k[i] = key_words[(2 * block + i) * Layout::PITCH];
                v[i] = FIRST ? k[i] : value_words[(2 * block + i) * Layout::PITCH];
            }
            float s[2][4];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const float2 norm = *reinterpret_cast<const float2*>(norms + (2 * block + row) * Layout::WIDTH);
                const int dy = 2 * block + row - REACH;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float own;
                    if (ROWS == 1) {
                        own = abs(dy) <= kRadiusFar ? near[e] : abs(dy) <= REACH ? far[e] : kShut;
                    } else {
                        own = abs(dy - queries.row[e >> 1] * kCell) <= queries.radius[e >> 1] ? near[e] : kShut;
                    }
                    s[row][e] = own + (e & 1 ? norm.y : norm.x);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                mma(s[0], queries.words[i], k[2 * i], k[2 * i + 1]);
                mma(s[1], queries.words[i], k[2 * i + 1], k[2 * i + 2]);
            }
            uint32_t p[4];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float w[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    w[e] = exp2_fast(fmaf(s[row][e], logit.scale, logit.offset));
                }
                p[2 * row] = smaller(pack(w[0], w[1]), logit.most);
                p[2 * row + 1] = smaller(pack(w[2], w[3]), logit.most);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                mma(result.out[i], p, v[i], v[i + 1]);
            }
            mma(result.total, p, 0x3F803F80u, 0x3F803F80u);
#pragma unroll
            for (int i = 0; i < 7; ++i) {
                k[i] = k[i + 2];
                v[i] = v[i + 2];
            }
        }
    }
}

extern __shared__ __align__(16) uint8_t memory[];

template <int FRAMES, bool FIRST>
__device__ inline void attend(const Attend& args) {
    using Layout = Keys<FRAMES, FIRST>;
    constexpr int ROWS = Layout::ROWS;
    Shared<FRAMES, FIRST>& shared = *reinterpret_cast<Shared<FRAMES, FIRST>*>(memory);
    Sums<FRAMES>& sums = shared.sums;
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
    const int height = raster_height(plane);
    auto values_of = [&](int frame) {
        int slot = args.first_slot + frame;
        slot += slot < 0 ? args.slots : slot < args.slots ? 0 : -args.slots;
        return Raster{args.values + slot * frame_bytes + plane_offset, width, height};
    };
    auto guides_of = [&](int frame) {
        return FIRST || frame < 0 ? values_of(frame) : Raster{args.guides + frame * frame_bytes + plane_offset, width, height};
    };

    // Key frames by number: context, then those of the chunk that are near enough. A bit for each that is looked at.
    const int first_key = max(0, first_frame - kReach);
    const int last_key = min(args.frames - 1, first_frame + FRAMES - 1 + kReach);
    auto key_of = [&](int number) { return number < args.context ? number - args.context : first_key + number - args.context; };
    auto time_of = [&](int key) { return key < 0 ? args.context_at[key + 2] : key; };
    uint32_t looked_at = 0;
    for (int number = 0; number <= args.context + last_key - first_key; ++number) {
        for (int f = first_frame; f < min(args.frames, first_frame + FRAMES); ++f) {
            looked_at |= uint32_t(abs(f - time_of(key_of(number))) <= kReach) << number;
        }
    }

    for (int i = threadIdx.x; i < int(sizeof(sums) / 4); i += kThreads) {
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
    const int patch_x = g % 4;

    // Whole pieces of 16 bytes are copied, from the piece that the tile's first key begins in.
    const int region_x = tile_x * kCell / 8 * 8;  // in the raster, whose first sample is number -kMargin of the plane
    const int strip_x = warp % kStripsX * 4;
    for (int round = 0; round < kTileY / (kStripsY * ROWS) && tile_y + round * kStripsY * ROWS < patches_y; ++round) {
        const int strip_y = (round * kStripsY + warp / kStripsX) * ROWS;
        const bool any = tile_x + strip_x < patches_x && tile_y + strip_y < patches_y;
        const int region_y = (tile_y + round * kStripsY * ROWS) * kCell;

        Queries queries;
        Result result;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                result.out[i][e] = 0.0f;
                result.total[e] = 0.0f;
            }
        }
        // Row g belongs to patch column g % 4 of frame and row `part`, row g + 8 to part + 2. Queries that do not exist
        // take the samples of a neighbour, and see no key.
        int frame[2];
        bool valid[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int part = g / 4 + 2 * half;
            frame[half] = first_frame + part % FRAMES;
            queries.row[half] = part / FRAMES;
            const int x = tile_x + strip_x + patch_x;
            const int y = tile_y + strip_y + queries.row[half];
            valid[half] = x < patches_x && y < patches_y && frame[half] < args.frames;
            const Raster own = guides_of(min(frame[half], args.frames - 1));
            const int64_t place = own.place(min(x, patches_x - 1) * kCell, min(y, patches_y - 1) * kCell);
            queries.norm[half] = own.norms()[place];
            const uint32_t* words = reinterpret_cast<const uint32_t*>(own.samples() + place) + j;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                queries.words[k][half] = words[2 * k * (width / 2)];
                queries.words[k][half + 2] = words[(2 * k + 1) * (width / 2)];
            }
        }

        auto copy = [&](int number, Layout& to) {
            const int key = key_of(number);
            copy_keys<FRAMES, FIRST>(to, guides_of(key), values_of(key), region_x, region_y);
        };
        uint32_t rest = looked_at;
        copy(__ffs(rest) - 1, shared.keys[0]);
        asm volatile("cp.async.commit_group;" ::: "memory");
        for (int buffer = 0; rest != 0; buffer ^= 1) {
            const int number = __ffs(rest) - 1;
            rest &= rest - 1;
            if (rest != 0) {
                copy(__ffs(rest) - 1, shared.keys[buffer ^ 1]);
            }
            asm volatile("cp.async.commit_group;\n\tcp.async.wait_group 1;" ::: "memory");
            __syncthreads();

            const int key = key_of(number);
            const int at = time_of(key);
            const float variance = FIRST ? 2.0f : kKeep * kKeep + (key >= 0 ? kKeep * kKeep : 1.0f);
            const float top = kLog2e * (key >= 0 ? fminf(-bias, 0.0f) : fminf(bias, 0.0f));
            const Logit logit{2.0f * scale, unit * variance + top, pack(exp2_fast(top), exp2_fast(top))};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int apart = abs(frame[half] - at);
                queries.radius[half] = !valid[half] || apart > kReach ? -1 : apart == 0 ? kRadius : kRadiusFar;
            }
            const int corner_x = (tile_x + strip_x) * kCell - region_x;
            const int corner_y = (strip_y - round * kStripsY * ROWS) * kCell;
            if (any && at >= first_frame && at < first_frame + FRAMES) {
                attend_to<FRAMES, FIRST, kRadius>(shared.keys[buffer], corner_x, corner_y, queries, logit, result);
            } else if (any) {
                attend_to<FRAMES, FIRST, kRadiusFar>(shared.keys[buffer], corner_x, corner_y, queries, logit, result);
            }
            __syncthreads();
        }

        // Patches of equal parity in both directions do not overlap, so four steps add them up without a race.
#pragma unroll 1
        for (int parity = 0; parity < 4; ++parity) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int x = strip_x + patch_x;
                const int y = strip_y + queries.row[half];
                if (!valid[half] || (x & 1) != (parity & 1) || (y & 1) != parity >> 1) {
                    continue;
                }
                const int f = frame[half] - first_frame;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float2* place = reinterpret_cast<float2*>(&sums.numerator[f][y * kCell + i][x * kCell + 2 * j]);
                    float2 sum = *place;
                    sum.x += result.out[i][2 * half];
                    sum.y += result.out[i][2 * half + 1];
                    *place = sum;
                }
                sums.denominator[f][y + (j >> 1)][x + (j & 1)] += result.total[2 * half];
            }
            __syncthreads();
        }
    }

    // A cell is complete where all patches that cover it belong to this tile: all but the first and last ones, unless
    // there the plane ends. One thread for each row of a cell.
    constexpr int LINES = FRAMES * kSamplesY * (kTileX + 1);
    for (int i = threadIdx.x; i < LINES; i += kThreads) {
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
        const int x = at_x * kCell;
        const int line = tile_y * kCell + y;
        const Raster noisy = values_of(first_frame + f);
        const __nv_bfloat16* own = noisy.samples() + noisy.place(x, line);
        float samples[kCell];
#pragma unroll
        for (int e = 0; e < kCell; ++e) {
            const float estimate = sums.numerator[f][y][cell_x * kCell + e] / denominator;
            // Guides are multiples of one half, so that distances stay exact.
            const float guide = rintf(2.0f * (estimate + kKeep * (__bfloat162float(own[e]) - estimate))) * 0.5f;
            samples[e] = args.last ? estimate + kCentre : guide;
        }
        const int64_t token = int64_t(first_frame + f) * geometry.tokens + plane.first_token + line / kPatch * plane.tokens_x +
                              x / kPatch;
        uint2* place = reinterpret_cast<uint2*>(args.out + token * kToken + line % kPatch * kPatch + x % kPatch);
        *place = make_uint2(pack(samples[0], samples[1]), pack(samples[2], samples[3]));
    }
}

}  // namespace pp

// One kernel for each number of frames that a block takes together, and for the first pass and the others.
// Grid: (tiles of all planes, ceil(frames / FRAMES)); block: 384; dynamic shared memory: sizeof(Shared<FRAMES, FIRST>).
#define PP_ATTEND(name, frames, first, bytes)                                                                   \
    static_assert(sizeof(pp::Shared<frames, first>) == bytes, "written where it is launched");                  \
    extern "C" __global__ void __launch_bounds__(pp::kThreads, 1) name(const __grid_constant__ pp::Attend args) { \
        pp::attend<frames, first>(args);                                                                        \
    }

PP_ATTEND(attend_first_1, 1, true, 110212)
PP_ATTEND(attend_first_2, 2, true, 105320)
PP_ATTEND(attend_first_4, 4, true, 145968)
PP_ATTEND(attend_next_1, 1, false, 153444)
PP_ATTEND(attend_next_2, 2, false, 131656)
PP_ATTEND(attend_next_4, 4, false, 163600)
