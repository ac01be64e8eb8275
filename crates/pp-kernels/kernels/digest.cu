// Digests of tensors, as docs/wire-format.md defines them: XXH3 (Y. Collet; 64 bits, seed 0) of blocks of 4 KiB filled up
// with zeros, then of the digests of the blocks, until one block is left.
//
// Eight lanes take one block. Each has one of the eight accumulators and reads every eighth word, so the eight read 64
// bytes in a row, and a block is 64 such rows. The words that XXH3 adds to the neighbour's accumulator are summed up and
// handed over once in 16 rows: additions may come in any order.
//
// All tensors of a payload go into one launch; one more closes the levels above, a block of threads for each tensor.
// Tensors begin at multiples of 8 bytes. `digests` and `above` have a place for each block of all tensors.

#include <cstdint>

constexpr int kMostTensors = 16;
constexpr int kLanes = 8;
constexpr int kBlockBytes = 4096;
constexpr int kBlockWords = kBlockBytes / 8;
constexpr int kThreads = 256;
constexpr int kGroups = kThreads / kLanes;

struct Tensors {
    uint64_t address[kMostTensors];
    uint64_t bytes[kMostTensors];
    // Number of each tensor's first block; behind the last tensor, how many there are.
    uint64_t first[kMostTensors + 1];
    uint64_t count;
};

// XXH3's secret as words, and the two places in it that are not at a multiple of 8.
__device__ const uint64_t kSecret[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};
__device__ const uint64_t kSecretOfLast[kLanes] = {
    0xea647378d9c97e9full, 0xc5c3ebd33483acc5ull, 0x17eb6313faffa081ull, 0xd349daf0b751dd0dull,
    0x2b9e68d429265516ull, 0x8ffca1477d58be16ull, 0x45ce31d07ad1b8f8ull, 0xaf280416958f3acbull,
};
__device__ const uint64_t kSecretOfMerge[kLanes] = {
    0x6dd4de1cad21f72cull, 0xa44072db979083e9ull, 0xe679cb1f67b3b7a4ull, 0xd05a8278e5c0cc4eull,
    0x4608b82172ffcc7dull, 0x9035e08e2443f774ull, 0x52283c4c263a81e6ull, 0x65d088cb00c391bbull,
};
__device__ const uint64_t kStart[kLanes] = {
    0x00000000c2b2ae3dull, 0x9e3779b185ebca87ull, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull,
    0x85ebca77c2b2ae63ull, 0x0000000085ebca77ull, 0x27d4eb2f165667c5ull, 0x000000009e3779b1ull,
};

// What one lane needs for every block.
struct Lane {
    uint64_t keys[16];
    uint64_t start, scramble, last, merge;
    uint32_t group;  // the lanes of its block, as a mask
    int index;

    __device__ Lane() : index(threadIdx.x % kLanes) {
#pragma unroll
        for (int row = 0; row < 16; ++row) keys[row] = kSecret[row + index];
        start = kStart[index];
        scramble = kSecret[16 + index];
        last = kSecretOfLast[index];
        merge = kSecretOfMerge[index];
        group = 0xffu << (threadIdx.x % 32 & ~(kLanes - 1));
    }
};

// The digest of the block whose words `word(index)` gives; every lane of the group gets it.
template <typename Word>
__device__ __forceinline__ uint64_t digest_of(const Lane& lane, const Word& word) {
    uint64_t sum = lane.start;
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {
        uint64_t handed = 0;
#pragma unroll
        for (int row = 0; row < 16; ++row) {
            const uint64_t value = word((part * 16 + row) * kLanes + lane.index);
            const uint64_t key = row == 15 && part == 3 ? lane.last : lane.keys[row];
            const uint64_t mixed = value ^ key;
            sum += (mixed & 0xffffffffu) * (mixed >> 32);
            handed += value;
        }
        sum += __shfl_xor_sync(lane.group, handed, 1);
        if (part < 3) sum = (sum ^ sum >> 47 ^ lane.scramble) * 0x9e3779b1u;
    }
    const uint64_t own = sum ^ lane.merge;
    const uint64_t other = __shfl_xor_sync(lane.group, own, 1);
    uint64_t hash = own * other ^ __umul64hi(own, other);
    hash += __shfl_xor_sync(lane.group, hash, 2);
    hash += __shfl_xor_sync(lane.group, hash, 4);
    hash += uint64_t(kBlockBytes) * 0x9e3779b185ebca87ull;
    hash = (hash ^ hash >> 37) * 0x165667919e3779f9ull;
    return hash ^ hash >> 32;
}

// The digest of every block of every tensor.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
digest_blocks(const __grid_constant__ Tensors tensors, uint64_t* __restrict__ digests) {
    const Lane lane;
    const uint64_t blocks = tensors.first[tensors.count];
    int tensor = 0;
    for (uint64_t block = uint64_t(blockIdx.x) * kGroups + threadIdx.x / kLanes; block < blocks;
         block += uint64_t(gridDim.x) * kGroups) {
        while (block >= tensors.first[tensor + 1]) ++tensor;
        const uint64_t begin = (block - tensors.first[tensor]) * kBlockBytes;
        const uint64_t bytes = tensors.bytes[tensor];
        const uint8_t* const data = reinterpret_cast<const uint8_t*>(tensors.address[tensor]) + begin;
        const uint64_t* const words = reinterpret_cast<const uint64_t*>(data);
        uint64_t digest;
        if (begin + kBlockBytes <= bytes) {
            digest = digest_of(lane, [=](int index) { return __ldg(words + index); });
        } else {
            const int rest = int(bytes - begin);
            digest = digest_of(lane, [=](int index) {
                if (8 * index + 8 <= rest) return __ldg(words + index);
                uint64_t word = 0;
#pragma unroll 1
                for (int byte = 8 * index; byte < rest; ++byte) word |= uint64_t(data[byte]) << 8 * (byte % 8);
                return word;
            });
        }
        if (lane.index == 0) digests[block] = digest;
    }
}

// From the digests of the blocks to that of each tensor, which goes to `out`.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
digest_tree(const __grid_constant__ Tensors tensors, uint64_t* digests, uint64_t* above, uint64_t* __restrict__ out) {
    const Lane lane;
    const uint64_t first = tensors.first[blockIdx.x];
    uint64_t count = tensors.first[blockIdx.x + 1] - first;
    uint64_t* from = digests + first;
    uint64_t* to = above + first;
    while (count > 1) {
        const uint64_t blocks = (count + kBlockWords - 1) / kBlockWords;
        for (uint64_t block = threadIdx.x / kLanes; block < blocks; block += kGroups) {
            const uint64_t* const words = from + block * kBlockWords;
            const uint64_t rest = count - block * kBlockWords;
            const uint64_t digest =
                digest_of(lane, [=](int index) { return uint64_t(index) < rest ? words[index] : 0; });
            if (lane.index == 0) to[block] = digest;
        }
        __syncthreads();
        uint64_t* const written = to;
        to = from;
        from = written;
        count = blocks;
    }
    if (threadIdx.x == 0) out[blockIdx.x] = *from;
}
