// Streams of memory traffic, to see what the device's memory gives and to disturb others on purpose.
//
// `count` counts 16-byte words; buffers are aligned to 16 bytes and should be several times the L2 cache. Grid: a few
// blocks for each multiprocessor; block: 512. `repeats` passes over the buffer are made in one launch.

#include <cstdint>

// Reads and writes: 32 bytes of traffic for each word and pass.
extern "C" __global__ void __launch_bounds__(512)
hbm_copy(const uint4* __restrict__ from, uint4* __restrict__ to, uint64_t count, uint32_t repeats) {
    const uint64_t stride = uint64_t(gridDim.x) * blockDim.x;
    for (uint32_t pass = 0; pass < repeats; ++pass) {
        uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
        // Four independent loads are in flight before the first store.
        for (; i + 3 * stride < count; i += 4 * stride) {
            const uint4 a = __ldcs(from + i);
            const uint4 b = __ldcs(from + i + stride);
            const uint4 c = __ldcs(from + i + 2 * stride);
            const uint4 d = __ldcs(from + i + 3 * stride);
            __stcs(to + i, a);
            __stcs(to + i + stride, b);
            __stcs(to + i + 2 * stride, c);
            __stcs(to + i + 3 * stride, d);
        }
        for (; i < count; i += stride) {
            __stcs(to + i, __ldcs(from + i));
        }
    }
}

// Reads only: 16 bytes for each word and pass. The sum goes to `sink` only in a case that does not happen, so that the
// compiler keeps the loads.
extern "C" __global__ void __launch_bounds__(512)
hbm_read(const uint4* __restrict__ from, uint32_t* __restrict__ sink, uint64_t count, uint32_t repeats) {
    const uint64_t stride = uint64_t(gridDim.x) * blockDim.x;
    uint32_t sum = repeats;
    for (uint32_t pass = 0; pass < repeats; ++pass) {
#pragma unroll 4
        for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
            const uint4 word = __ldcs(from + i);
            sum = sum * 3 + (word.x ^ word.y ^ word.z ^ word.w);
        }
    }
    if (sum == 0x9E3779B9u && repeats == 0xFFFFFFFFu) {
        *sink = sum;
    }
}

// Writes only: 16 bytes for each word and pass.
extern "C" __global__ void __launch_bounds__(512) hbm_write(uint4* __restrict__ to, uint64_t count, uint32_t repeats) {
    const uint64_t stride = uint64_t(gridDim.x) * blockDim.x;
    for (uint32_t pass = 0; pass < repeats; ++pass) {
        for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
            __stcs(to + i, make_uint4(uint32_t(i), pass, uint32_t(i), pass));
        }
    }
}
