// Checks the kernels on a GPU against a plain reference in f64, and times them. Prints one JSON object for each line.
//
//     nvcc -O3 -std=c++17 -arch=native -o kernel_bench crates/pp-kernels/kernels/bench/bench.cu -lcuda
//     ./kernel_bench DIRECTORY_WITH_PTX [check] [full] [time] [race]
//
// The reference is written from the formula in src/reference.rs: one thread for each weight, another for each sample; it
// shares no code with the kernels. It ends with 1 if a result is further from it than README.md allows. `full` checks
// 1280x720; `race` is one small case, for compute-sanitizer.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "../geometry.cuh"

using namespace pp;

#define CHECK(call)                                                                       \
    do {                                                                                  \
        int status = int(call);                                                           \
        if (status != 0) {                                                                \
            std::fprintf(stderr, "%s:%d: %s failed: %d\n", __FILE__, __LINE__, #call, status); \
            std::exit(2);                                                                 \
        }                                                                                 \
    } while (0)

struct Attend {
    const void *values, *guides;
    void* out;
    const float* sigma;
    const int64_t* step;
    float noise_scale, bias;
    int32_t frames, context, context_at[2], slots, first_slot, last, reserved;
    Geometry geometry;
};
static_assert(sizeof(Attend) == 160 && sizeof(Geometry) == 80, "as written in attend.cu");

static std::string directory;
static const char* architecture = "compute_90a";

static CUfunction kernel(const std::string& file, const std::string& name) {
    static std::map<std::string, CUmodule> modules;
    if (!modules.count(file)) {
        const std::string path = directory + "/" + file + "." + architecture + ".ptx";
        std::ifstream in(path);
        const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
        if (text.empty()) {
            std::fprintf(stderr, "cannot read %s\n", path.c_str());
            std::exit(2);
        }
        CHECK(cuModuleLoadData(&modules[file], text.c_str()));
    }
    CUfunction function;
    CHECK(cuModuleGetFunction(&function, modules[file], name.c_str()));
    return function;
}

template <typename... Args>
static void launch(CUfunction function, dim3 grid, int block, int shared, Args... args) {
    void* pointers[] = {&args...};
    CHECK(cuLaunchKernel(function, grid.x, grid.y, grid.z, block, 1, 1, shared, nullptr, pointers, nullptr));
}

template <typename T>
static T* device(size_t count) {
    T* pointer;
    CHECK(cudaMalloc(&pointer, count * sizeof(T)));
    CHECK(cudaMemset(pointer, 0xFF, count * sizeof(T)));
    return pointer;
}

template <typename T>
static std::vector<T> fetch(const T* pointer, size_t count) {
    std::vector<T> values(count);
    CHECK(cudaMemcpy(values.data(), pointer, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

// 4:2:0 or luma alone.
static Geometry make_geometry(int width, int height, bool colour) {
    Geometry geometry{};
    geometry.planes = colour ? 3 : 1;
    int offset = 0;
    for (int i = 0; i < geometry.planes; ++i) {
        Plane& p = geometry.plane[i];
        p.width = i == 0 ? width : (width + 1) / 2;
        p.height = i == 0 ? height : (height + 1) / 2;
        p.tokens_x = (p.width + 7) / 8;
        p.tokens_y = (p.height + 7) / 8;
        p.first_token = geometry.tokens;
        p.offset = offset;
        geometry.tokens += p.tokens_x * p.tokens_y;
        offset += p.width * p.height;
    }
    return geometry;
}

static size_t packed_bytes(const Geometry& g) {
    const Plane& p = g.plane[g.planes - 1];
    return p.offset + size_t(p.width) * p.height;
}

// What Phase B keeps, and how one chunk goes through it: as the host launches it.
struct PhaseB {
    Geometry geometry;
    int max_frames, slots, position = 0, context = 0;
    size_t scratch_bytes;
    uint8_t *values, *guides;
    uint16_t* between;
    float* sigma;

    PhaseB(const Geometry& g, int frames) : geometry(g), max_frames(frames), slots(frames + 2) {
        scratch_bytes = raster_offset(g, g.planes);
        values = device<uint8_t>(scratch_bytes * slots);
        guides = device<uint8_t>(scratch_bytes * frames);
        between = device<uint16_t>(size_t(frames) * g.tokens * kToken);
        sigma = device<float>(3);
    }
    ~PhaseB() {
        cudaFree(values), cudaFree(guides), cudaFree(between), cudaFree(sigma);
    }
    void unfold(const char* name, const uint16_t* tokens, uint8_t* scratch, int frames, int first_slot, int slot_count) const {
        int tiles = 0;
        for (int i = 0; i < geometry.planes; ++i) {
            const Plane& p = geometry.plane[i];
            tiles = std::max(tiles, (raster_width(p) + 63) / 64 * ((raster_height(p) + 31) / 32));
        }
        launch(kernel("unfold", name), dim3(tiles, frames * geometry.planes), 256, 0, tokens, scratch, geometry,
               first_slot, slot_count);
    }
    int tiles() const {
        int total = 0;
        for (int i = 0; i < geometry.planes; ++i) {
            const Plane& p = geometry.plane[i];
            total += std::max(1, (2 * p.tokens_x - 2 + TILE_X - 2) / (TILE_X - 1)) *
                     std::max(1, (2 * p.tokens_y - 2 + TILE_Y - 2) / (TILE_Y - 1));
        }
        return total;
    }
    static constexpr int TILE_X = 16, TILE_Y = 24;
    void attend(const uint16_t* out, int frames, bool first, bool last, const int64_t* step, float noise_scale, float bias) const {
        Attend a{values, guides, (void*)out, sigma, step, noise_scale, bias, frames, context, {-2, -1}, slots, position, last, 0,
                 geometry};
        const int together = frames == 1 ? 1 : frames == 2 ? 2 : 4;
        const CUfunction f =
            kernel("attend", std::string(first ? "attend_first_" : "attend_next_") + std::to_string(together));
        const int shared = first ? together == 1 ? 110212 : together == 2 ? 105320 : 145968
                                 : together == 1 ? 153444 : together == 2 ? 131656 : 163600;
        CHECK(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared));
        launch(f, dim3(tiles(), (frames + together - 1) / together), 384, shared, a);
    }
    void run(const uint16_t* in, uint16_t* out, int frames, int steps, const int64_t* list, float noise_scale, float bias) {
        unfold("unfold", in, values, frames, position, slots);
        for (int n = 0; n < steps; ++n) {
            if (n > 0) {
                unfold("unfold_guides", between, guides, frames, 0, max_frames);
            }
            const bool last = n + 1 == steps;
            attend(last ? out : between, frames, n == 0, last, list + n, noise_scale, bias);
        }
        position = (position + frames) % slots;
        context = std::min(2, context + frames);
    }
};

// The reference, for one plane: frames are rasters of doubles, the first `context` of them are context.
struct Reference {
    int width, height, context, frames;
    double sigma, bias, strength;
    double variance;  // of the guides of the chunk
};

__device__ int fold(int i, int n) {
    while (i < 0 || i >= n) {
        i = i < 0 ? -1 - i : 2 * n - 1 - i;
    }
    return i;
}

__device__ int radius_of(int distance) { return distance == 0 ? 4 : distance <= 2 ? 2 : -1; }

// weights[t][delta + 2][patch][offset]
__global__ void reference_weights(Reference r, const double* noisy, const double* guides, double* weights) {
    const int px = r.width / 4 - 1, py = r.height / 4 - 1;
    const size_t count = size_t(r.frames) * 5 * px * py * 81;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
        const int o = i % 81, dx = o % 9 - 4, dy = o / 9 - 4;
        const size_t patch = i / 81 % (size_t(px) * py);
        const int left = patch % px * 4, top = patch / px * 4;
        const int delta = int(i / 81 / px / py % 5) - 2, t = int(i / 81 / px / py / 5), s = t + delta;
        weights[i] = 0;
        if (s < -r.context || s >= r.frames || abs(dx) > radius_of(abs(delta)) || abs(dy) > radius_of(abs(delta))) {
            continue;
        }
        const size_t area = size_t(r.width) * r.height;
        const double* query = guides + t * area;
        const double* key = s < 0 ? noisy + (s + r.context) * area : guides + s * area;
        double distance = 0;
        for (int y = 0; y < 8; ++y) {
            for (int x = 0; x < 8; ++x) {
                const double d = query[size_t(top + y) * r.width + left + x] -
                                 key[size_t(fold(top + y + dy, r.height)) * r.width + fold(left + x + dx, r.width)];
                distance += d * d;
            }
        }
        const double floor = 64 * 1.1f * (r.variance + (s < 0 ? 1.0 : r.variance)) * r.sigma * r.sigma;
        const double h2 = fmax(r.strength * r.sigma * r.strength * r.sigma, double(1e-6f));
        weights[i] = exp((s < 0 ? r.bias : 0.0) - fmax(distance - floor, 0.0) / (64 * h2));
    }
}

__global__ void reference_gather(Reference r, const double* noisy, const double* weights, double* out) {
    const int px = r.width / 4 - 1, py = r.height / 4 - 1;
    const size_t area = size_t(r.width) * r.height;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < area * r.frames; i += size_t(gridDim.x) * blockDim.x) {
        const int x = i % r.width, y = i / r.width % r.height, t = i / area;
        double numerator = 0, denominator = 0;
        for (int b = max(0, y / 4 - 1); b <= min(py - 1, y / 4); ++b) {
            for (int a = max(0, x / 4 - 1); a <= min(px - 1, x / 4); ++a) {
                for (int delta = -2; delta <= 2; ++delta) {
                    const int s = t + delta;
                    if (s < -r.context || s >= r.frames) {
                        continue;
                    }
                    const double* w = weights + ((size_t(t) * 5 + delta + 2) * px * py + size_t(b) * px + a) * 81;
                    const double* value = noisy + (s + r.context) * area;
                    for (int o = 0; o < 81; ++o) {
                        if (w[o] != 0) {
                            numerator += w[o] * value[size_t(fold(y + o / 9 - 4, r.height)) * r.width + fold(x + o % 9 - 4, r.width)];
                            denominator += w[o];
                        }
                    }
                }
            }
        }
        out[i] = numerator / denominator;
    }
}

// The result of all passes over one plane.
static std::vector<double> reference(const Plane& p, const std::vector<double>& noisy, int context, int frames, double sigma,
                                     double bias, const std::vector<int64_t>& steps) {
    const int width = p.tokens_x * 8, height = p.tokens_y * 8;
    const size_t area = size_t(width) * height;
    double* d_noisy = device<double>(noisy.size());
    double* d_guides = device<double>(area * frames);
    double* d_out = device<double>(area * frames);
    double* d_weights = device<double>(size_t(frames) * 5 * (width / 4 - 1) * (height / 4 - 1) * 81);
    CHECK(cudaMemcpy(d_noisy, noisy.data(), noisy.size() * 8, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_guides, d_noisy + area * context, area * frames * 8, cudaMemcpyDeviceToDevice));
    std::vector<double> out(noisy.begin() + area * context, noisy.end());
    for (size_t n = 0; n < steps.size(); ++n) {
        Reference r{width, height, context, frames, sigma, bias, double(steps[n]) / 1000.0, n == 0 ? 1.0 : 0.25};
        reference_weights<<<4096, 256>>>(r, d_noisy, d_guides, d_weights);
        reference_gather<<<4096, 256>>>(r, d_noisy, d_weights, d_out);
        CHECK(cudaDeviceSynchronize());
        out = fetch(d_out, area * frames);
        std::vector<double> guides(out.size());
        for (size_t i = 0; i < out.size(); ++i) {
            guides[i] = out[i] + 0.5 * (noisy[area * context + i] - out[i]);
        }
        CHECK(cudaMemcpy(d_guides, guides.data(), guides.size() * 8, cudaMemcpyHostToDevice));
    }
    cudaFree(d_noisy), cudaFree(d_guides), cudaFree(d_out), cudaFree(d_weights);
    return out;
}

static double bf16_to_double(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

// A plane of one frame out of tokens.
static void untoken(const Geometry& g, const Plane& p, const uint16_t* frame, std::vector<double>& out) {
    const int width = p.tokens_x * 8, height = p.tokens_y * 8;
    for (int y = 0; y < height; ++y) {
        for (int x = 0; x < width; ++x) {
            const size_t token = p.first_token + y / 8 * p.tokens_x + x / 8;
            out.push_back(bf16_to_double(frame[token * 64 + y % 8 * 8 + x % 8]));
        }
    }
}

// Smooth shapes, edges and fine texture that move, with Gaussian noise.
static std::vector<uint8_t> clip(const Geometry& g, int frames, float sigma, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 1);
    std::vector<uint8_t> all(frames * packed_bytes(g));
    for (int t = 0; t < frames; ++t) {
        for (int i = 0; i < g.planes; ++i) {
            const Plane& p = g.plane[i];
            uint8_t* out = all.data() + t * packed_bytes(g) + p.offset;
            for (int y = 0; y < p.height; ++y) {
                for (int x = 0; x < p.width; ++x) {
                    const float u = x + 0.7f * t, v = y - 0.4f * t;
                    float s = 120 + 60 * std::sin(u * 0.021f) * std::cos(v * 0.017f) + 25 * std::sin(u * 0.31f + v * 0.11f);
                    s += (int(u / 37) + int(v / 29 + 100)) % 2 ? 45 : -15;
                    s += normal(random) * sigma;
                    out[size_t(y) * p.width + x] = uint8_t(std::min(255.0f, std::max(0.0f, std::round(s))));
                }
            }
        }
    }
    return all;
}

struct Case {
    int width, height;
    bool colour;
    std::vector<int> chunks;
    int steps;
    float sigma, noise_scale, bias;
};

// README.md beside the kernels derives it.
static double tolerance(double value, double sigma, int steps) { return value / 256 + 0.035 * sigma + (steps > 1 ? 1.25 : 0); }
constexpr double kLeastPsnr = 60;
constexpr double kMostFar = 1e-4;  // share of samples that may be two steps of 8 bits away

static bool check(const Case& c) {
    const Geometry g = make_geometry(c.width, c.height, c.colour);
    int total = 0, most = 0;
    for (int n : c.chunks) {
        total += n, most = std::max(most, n);
    }
    const size_t packed = packed_bytes(g), stride = (packed + 255) / 256 * 256;
    const auto samples = clip(g, total, c.sigma, c.width + c.steps);
    std::vector<uint8_t> strided(stride * total);
    for (int t = 0; t < total; ++t) {
        std::copy_n(samples.data() + t * packed, packed, strided.data() + t * stride);
    }
    uint8_t* frames = device<uint8_t>(strided.size());
    CHECK(cudaMemcpy(frames, strided.data(), strided.size(), cudaMemcpyHostToDevice));
    const size_t frame_tokens = size_t(g.tokens) * 64;
    uint16_t* tokens = device<uint16_t>(frame_tokens * total);
    uint16_t* result = device<uint16_t>(frame_tokens * total);
    launch(kernel("encode", "encode"), dim3((total * g.tokens * 8 + 255) / 256), 256, 0, frames, uint64_t(stride), tokens, g, total);

    // Encode and decode are the identity.
    uint8_t* back = device<uint8_t>(strided.size());
    launch(kernel("decode", "decode"), dim3((total * g.tokens * 8 + 255) / 256), 256, 0, tokens, back, uint64_t(stride), g, total);
    CHECK(cudaDeviceSynchronize());
    const auto returned = fetch(back, strided.size());
    bool good = true;
    for (int t = 0; t < total; ++t) {
        good &= std::memcmp(returned.data() + t * stride, samples.data() + t * packed, packed) == 0;
    }

    PhaseB phase_b(g, most);
    const float sigma[3] = {c.sigma, c.sigma, c.sigma};
    CHECK(cudaMemcpy(phase_b.sigma, sigma, sizeof(sigma), cudaMemcpyHostToDevice));
    std::vector<int64_t> steps;
    for (int n = 0; n < c.steps; ++n) {
        steps.push_back(n == 0 ? 400 : 450);
    }
    int64_t* list = device<int64_t>(steps.size());
    CHECK(cudaMemcpy(list, steps.data(), steps.size() * 8, cudaMemcpyHostToDevice));

    const auto all_tokens = fetch(tokens, frame_tokens * total);
    double worst = 0, worst_share = 0, squares = 0, eight_bit_squares = 0;
    size_t count = 0, differing = 0, far = 0;
    int from = 0;
    for (int n : c.chunks) {
        const int context = std::min(2, from);
        phase_b.run(tokens + from * frame_tokens, result + from * frame_tokens, n, c.steps, list, c.noise_scale, c.bias);
        CHECK(cudaDeviceSynchronize());
        const auto found_tokens = fetch(result + from * frame_tokens, n * frame_tokens);
        for (int i = 0; i < g.planes; ++i) {
            std::vector<double> noisy, found;
            for (int t = from - context; t < from + n; ++t) {
                untoken(g, g.plane[i], all_tokens.data() + t * frame_tokens, noisy);
            }
            for (int t = 0; t < n; ++t) {
                untoken(g, g.plane[i], found_tokens.data() + t * frame_tokens, found);
            }
            const auto expected = reference(g.plane[i], noisy, context, n, double(c.sigma) * c.noise_scale, c.bias, steps);
            for (size_t k = 0; k < found.size(); ++k) {
                const double error = std::abs(found[k] - expected[k]);
                const double allowed = tolerance(expected[k], c.sigma * c.noise_scale, c.steps);
                good &= error <= allowed;  // NaN fails
                worst = std::max(worst, error);
                worst_share = std::max(worst_share, std::isnan(error) ? 1e9 : error / allowed);
                squares += error * error;
                // What the CPU backend would give: its f32 result is the reference's but for the last bits.
                const float rounded = __bfloat162float(__float2bfloat16_rn(float(expected[k])));
                const int step = std::abs(int(std::min(255.0, found[k] + 0.5)) - int(std::min(255.0f, rounded + 0.5f)));
                differing += step > 0, far += step > 1, eight_bit_squares += step * step;
                ++count;
            }
        }
        from += n;
    }
    const double psnr = 10 * std::log10(255.0 * 255.0 * count / std::max(eight_bit_squares, 1e-9));
    good &= psnr >= kLeastPsnr && far <= kMostFar * count;
    std::printf("{\"check\": \"%dx%d%s\", \"chunks\": %zu, \"first\": %d, \"steps\": %d, \"sigma\": %g, \"scale\": %g, \"bias\": %g, "
                "\"worst\": %.3f, \"of_allowed\": %.3f, \"rms\": %.4f, \"differ_8bit\": %.5f, \"by_more_than_1\": %.2e, "
                "\"psnr_8bit\": %.1f, \"good\": %s}\n",
                c.width, c.height, c.colour ? " 4:2:0" : "", c.chunks.size(), c.chunks[0], c.steps, c.sigma, c.noise_scale, c.bias,
                worst, worst_share, std::sqrt(squares / count), double(differing) / count, double(far) / count,
                psnr, good ? "true" : "false");
    std::fflush(stdout);
    cudaFree(frames), cudaFree(tokens), cudaFree(result), cudaFree(back), cudaFree(list);
    return good;
}

// The estimate of src/cpu/noise.rs, for one plane.
static float estimate_sigma(const uint8_t* samples, int width, int height) {
    std::vector<uint32_t> histogram(16 * 255 + 1);
    uint32_t count = 0;
    for (int y = 1; y + 1 < height; ++y) {
        for (int x = 1; x + 1 < width; ++x) {
            const uint8_t* b = samples + size_t(y) * width + x;
            if (*b == 0 || *b == 255) {
                continue;
            }
            const int response = b[-width - 1] + b[-width + 1] + b[width - 1] + b[width + 1] -
                                 2 * (b[-width] + b[-1] + b[1] + b[width]) + 4 * b[0];
            ++histogram[std::abs(response)];
            ++count;
        }
    }
    double below = 0;
    for (size_t value = 0; count > 0 && value < histogram.size(); ++value) {
        const double n = histogram[value];
        if (below + n >= count / 2.0) {
            const double start = value == 0 ? 0.0 : value - 0.5, length = value == 0 ? 0.5 : 1.0;
            return float((start + length * (count / 2.0 - below) / n) / (6.0 * 0.67448975));
        }
        below += n;
    }
    return 0;
}

// The estimate of the noise, bit for bit, twice in a row; and the small tensors.
static bool check_noise(int width, int height, float sigma) {
    const Geometry g = make_geometry(width, height, true);
    const auto samples = clip(g, 1, sigma, 3);
    uint8_t* frame = device<uint8_t>(samples.size());
    CHECK(cudaMemcpy(frame, samples.data(), samples.size(), cudaMemcpyHostToDevice));
    uint32_t* histogram = device<uint32_t>(3 * 4096);
    CHECK(cudaMemset(histogram, 0, 3 * 4096 * 4));
    float* found = device<float>(6);
    uint16_t* embeds = device<uint16_t>(3);
    int64_t* steps = device<int64_t>(3);
    for (int i = 0; i < 2; ++i) {
        launch(kernel("noise", "noise_count"), dim3(64, 3), 256, 0, frame, g, histogram);
        launch(kernel("noise", "noise_sigma"), dim3(3), 1024, 0, histogram, found + 3 * i);
    }
    launch(kernel("noise", "conditioning"), dim3(1), 32, 0, found, 3, embeds, steps, 3, int64_t(400), int64_t(450));
    float* kept = device<float>(3);
    launch(kernel("noise", "condition"), dim3(1), 32, 0, embeds, 3, kept);
    CHECK(cudaDeviceSynchronize());
    bool good = fetch(steps, 3) == std::vector<int64_t>{400, 450, 450};
    for (int i = 0; i < 3; ++i) {
        const Plane& p = g.plane[i];
        const float expected = estimate_sigma(samples.data() + p.offset, p.width, p.height);
        good &= fetch(found, 6)[i] == expected && fetch(found, 6)[i + 3] == expected;
        good &= fetch(kept, 3)[i] == __bfloat162float(__float2bfloat16_rn(expected));
    }
    std::printf("{\"check\": \"noise of %dx%d\", \"sigma\": %g, \"found\": %g, \"good\": %s}\n", width, height, sigma, fetch(found, 1)[0],
                good ? "true" : "false");
    cudaFree(frame), cudaFree(histogram), cudaFree(found), cudaFree(embeds), cudaFree(steps), cudaFree(kept);
    return good;
}

// The median over `runs` of the time in microseconds.
static double time_us(const std::function<void()>& work, int runs = 21) {
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < runs + 3; ++i) {
        CHECK(cudaEventRecord(start));
        work();
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (i >= 3) {
            times.push_back(ms);
        }
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1000.0;
}

// Products that one pass issues, and those that the windows need.
static void count_flops(const PhaseB& b, int frames, double& issued, double& useful) {
    issued = useful = 0;
    const int together = frames == 1 ? 1 : frames == 2 ? 2 : 4, rows = 4 / together;
    for (int i = 0; i < b.geometry.planes; ++i) {
        const Plane& p = b.geometry.plane[i];
        const int px = 2 * p.tokens_x - 1, py = 2 * p.tokens_y - 1;
        double strips = 0;
        for (int ty = 0; ty < std::max(1, (py - 1 + PhaseB::TILE_Y - 2) / (PhaseB::TILE_Y - 1)); ++ty) {
            for (int tx = 0; tx < std::max(1, (px - 1 + PhaseB::TILE_X - 2) / (PhaseB::TILE_X - 1)); ++tx) {
                for (int y = 0; y < PhaseB::TILE_Y; y += rows) {
                    for (int x = 0; x < PhaseB::TILE_X; x += 4) {
                        strips += tx * (PhaseB::TILE_X - 1) + x < px && ty * (PhaseB::TILE_Y - 1) + y < py;
                    }
                }
            }
        }
        for (int f = 0; f < frames; f += together) {
            for (int key = -b.context; key < frames; ++key) {
                int reach = -1;
                for (int t = f; t < std::min(frames, f + together); ++t) {
                    const int far = std::abs(t - key);
                    const int radius = far == 0 ? 4 : far <= 2 ? 2 : -1;
                    reach = std::max(reach, radius);
                    useful += radius < 0 ? 0 : 256.0 * px * py * (2 * radius + 1) * (2 * radius + 1);
                }
                if (reach >= 0) {
                    issued += strips * 3 * ((4 * (rows - 1) + 2 * reach + 2) / 2) * 17 * 4096.0;
                }
            }
        }
    }
}

static void time_all() {
    const Geometry g = make_geometry(1280, 720, true);
    const size_t packed = packed_bytes(g), frame_tokens = size_t(g.tokens) * 64;
    const int most = 8;
    const auto samples = clip(g, most, 20, 1);
    uint8_t* frames = device<uint8_t>(samples.size());
    CHECK(cudaMemcpy(frames, samples.data(), samples.size(), cudaMemcpyHostToDevice));
    uint16_t* tokens = device<uint16_t>(frame_tokens * most);
    uint16_t* result = device<uint16_t>(frame_tokens * most);
    const int64_t steps[2] = {400, 450};
    int64_t* list = device<int64_t>(2);
    CHECK(cudaMemcpy(list, steps, 16, cudaMemcpyHostToDevice));
    const float sigma[3] = {20, 20, 20};

    for (int n : {1, 2, 4, 8}) {
        const auto rows = dim3((n * g.tokens * 8 + 255) / 256);
        const auto encode = [&] { launch(kernel("encode", "encode"), rows, 256, 0, frames, uint64_t(packed), tokens, g, n); };
        const auto decode = [&] { launch(kernel("decode", "decode"), rows, 256, 0, tokens, frames, uint64_t(packed), g, n); };
        const double moved = double(n) * g.tokens * 64 * 3;
        double us = time_us(encode);
        std::printf("{\"kernel\": \"encode\", \"frames\": %d, \"us\": %.2f, \"gb_per_s\": %.0f}\n", n, us, moved / us / 1e3);
        us = time_us(decode);
        std::printf("{\"kernel\": \"decode\", \"frames\": %d, \"us\": %.2f, \"gb_per_s\": %.0f}\n", n, us, moved / us / 1e3);
        PhaseB b(g, n);
        CHECK(cudaMemcpy(b.sigma, sigma, sizeof(sigma), cudaMemcpyHostToDevice));
        b.run(tokens, result, n, 2, list, 1, 0);
        b.run(tokens, result, n, 2, list, 1, 0);
        us = time_us([&] { b.unfold("unfold", tokens, b.guides, n, 0, n); });
        std::printf("{\"kernel\": \"unfold\", \"frames\": %d, \"us\": %.2f, \"gb_per_s\": %.0f}\n", n, us,
                    n * (g.tokens * 128.0 + b.scratch_bytes) / us / 1e3);
        double issued, useful;
        count_flops(b, n, issued, useful);
        for (bool first : {true, false}) {
            us = time_us([&] { b.attend(result, n, first, true, list, 1, 0); });
            std::printf("{\"kernel\": \"attend_%s\", \"frames\": %d, \"us\": %.1f, \"us_per_frame\": %.1f, \"tflops_issued\": %.1f, "
                        "\"tflops_useful\": %.1f, \"useful_share\": %.3f}\n",
                        first ? "first" : "next", n, us, us / n, issued / us / 1e6, useful / us / 1e6, useful / issued);
        }
        us = time_us([&] { b.run(tokens, result, n, 2, list, 1, 0); });
        std::printf("{\"kernel\": \"phase_b\", \"frames\": %d, \"steps\": 2, \"us\": %.1f, \"frames_per_s\": %.0f}\n", n, us, n / us * 1e6);
        std::fflush(stdout);
    }

    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    const uint64_t words = uint64_t(2) << 26;  // 2 GiB
    uint4* from = device<uint4>(words);
    uint4* to = device<uint4>(words);
    const dim3 grid(4 * properties.multiProcessorCount);
    double us = time_us([&] { launch(kernel("hbm", "hbm_copy"), grid, 512, 0, from, to, words, 1u); }, 7);
    std::printf("{\"kernel\": \"hbm_copy\", \"us\": %.1f, \"gb_per_s\": %.0f}\n", us, words * 32 / us / 1e3);
    us = time_us([&] { launch(kernel("hbm", "hbm_read"), grid, 512, 0, from, (uint32_t*)to, words, 1u); }, 7);
    std::printf("{\"kernel\": \"hbm_read\", \"us\": %.1f, \"gb_per_s\": %.0f}\n", us, words * 16 / us / 1e3);
    us = time_us([&] { launch(kernel("hbm", "hbm_write"), grid, 512, 0, to, words, 1u); }, 7);
    std::printf("{\"kernel\": \"hbm_write\", \"us\": %.1f, \"gb_per_s\": %.0f}\n", us, words * 16 / us / 1e3);
    us = time_us([&] { CHECK(cudaMemcpyAsync(to, from, words * 16, cudaMemcpyDeviceToDevice)); }, 7);
    std::printf("{\"kernel\": \"cudaMemcpy\", \"us\": %.1f, \"gb_per_s\": %.0f}\n", us, words * 32 / us / 1e3);
    for (uint64_t ns : {uint64_t(200000), uint64_t(1000000), uint64_t(5000000)}) {
        us = time_us([&] { launch(kernel("spin", "spin"), dim3(properties.multiProcessorCount), 32, 0, ns); });
        std::printf("{\"kernel\": \"spin\", \"asked_us\": %.0f, \"us\": %.1f}\n", ns / 1e3, us);
    }
}

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: kernel_bench DIRECTORY_WITH_PTX [check] [full] [time] [race]\n");
        return 2;
    }
    directory = argv[1];
    const auto asked = [&](const char* what) {
        return argc == 2 || std::any_of(argv + 2, argv + argc, [&](const char* arg) { return std::strcmp(arg, what) == 0; });
    };
    CHECK(cudaFree(nullptr));
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    if (properties.major != 9 || std::getenv("PP_COMPUTE_80")) {
        architecture = "compute_80";
    }
    std::printf("{\"device\": \"%s\", \"ptx\": \"%s\"}\n", properties.name, architecture);
    bool good = true;
    if (asked("check")) {
        for (float sigma : {0.0f, 3.0f, 20.0f}) {
            good &= check_noise(333, 222, sigma);
        }
        for (const Case& c : std::vector<Case>{
                 {16, 16, false, {1}, 1, 20, 1, 0},
                 {61, 45, false, {4, 2}, 1, 20, 1, 0},
                 {29, 21, true, {4, 2}, 2, 20, 1, 0},
                 {24, 40, false, {3, 5}, 2, 20, 0.5f, -0.7f},
                 {140, 36, true, {8, 8, 1}, 2, 20, 0.6f, 1.3f},
                 {200, 120, true, {1, 1, 1, 2, 2}, 2, 20, 1, 0},
                 {203, 117, true, {9}, 3, 10, 1, 0},
                 {160, 120, false, {4, 4}, 2, 5, 1, 0},
                 {160, 120, false, {4, 4}, 2, 2, 1, 0},
                 {160, 120, false, {4, 4}, 2, 0.5f, 1, 0},
                 {160, 120, false, {4, 4}, 2, 0, 1, 0},
                 {160, 120, false, {4, 4}, 2, 60, 1, 0},
             }) {
            good &= check(c);
        }
    }
    if (argc > 2 && asked("race")) {
        good &= check({136, 104, true, {4, 2, 1}, 2, 20, 1, 0});
    }
    if (asked("full")) {
        good &= check({1280, 720, true, {8}, 1, 20, 1, 0});
        good &= check({1280, 720, true, {8}, 2, 20, 1, 0});
    }
    if (asked("time")) {
        time_all();
    }
    return good ? 0 : 1;
}
