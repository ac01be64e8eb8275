// The hand-written limit: what two GPUs and NCCL can do with nothing around them. No program can be faster there by
// more than noise.
//
//     nvcc -O2 -std=c++17 -arch=native -o nccl_limit nccl_limit.cu -lnccl && ./nccl_limit
//
// One process; for each rank a thread and a device; for each direction a communicator. First bare ncclSend and ncclRecv:
// one way (many in a row, timed by events) and there and back (one at a time, timed by the host). Then the pipeline: the
// front sends a chunk, phase B works on it and sends it back, the front decodes it; four slots. All of it is enqueued
// ahead and ordered by events alone, so no host stands in the way of a chunk. Stages spin on the GPU for as long as asked.
// Prints one JSON object for each line; times are medians.

#include <cuda_runtime.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

constexpr int FRONT = 0, PHASE_B = 1;
constexpr size_t LARGEST = size_t(1) << 30;
constexpr size_t SIZES[] = {4, 65536, 1 << 20, 22118400, 64 << 20, LARGEST};
constexpr size_t PAYLOADS[] = {65536, 22118400};
constexpr double STAGES_MS[] = {0, 0.2, 1, 5};
constexpr int SLOTS = 4;
// How many chunks the host enqueues before the first of them has to be done: less than fills a queue of the driver.
constexpr int AHEAD = 32;

// Each of them ends the process at once: the other thread may wait for this one inside NCCL.
[[noreturn]] static void die(const char* call, int line, const char* why) {
    std::fprintf(stderr, "nccl_limit.cu:%d: %s: %s\n", line, call, why);
    _exit(1);
}
static void check(cudaError_t error, const char* call, int line) {
    if (error != cudaSuccess) die(call, line, cudaGetErrorString(error));
}
static void check(ncclResult_t result, const char* call, int line) {
    if (result != ncclSuccess) die(call, line, ncclGetErrorString(result));
}
#define CHECK(call) check(call, #call, __LINE__)

// The two threads meet here.
static struct {
    std::atomic<int> waiting{0}, round{0};
    void wait() {
        const int now = round;
        if (++waiting == 2) {
            waiting = 0;
            ++round;
        } else {
            while (round == now) {
            }
        }
    }
} meeting;

// Both ends of the communicator from the front to phase B, and of the one back.
static ncclComm_t there[2], back[2];

template <typename Work>
static void on_both_ranks(Work work) {
    std::thread other(work, PHASE_B);
    work(FRONT);
    other.join();
}

static cudaStream_t make_stream() {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static cudaEvent_t make_event(unsigned flags) {
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, flags));
    return event;
}

static char* make_buffer(size_t bytes) {
    char* buffer;
    CHECK(cudaMalloc(&buffer, bytes));
    CHECK(cudaMemset(buffer, 7, bytes));
    return buffer;
}

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// --- bare operations ------------------------------------------------------------------------------------------------

// Microseconds of one of many sends in a row, from so many buffers in turn: one of 22 MB stays in the GPU's cache, four
// do not.
static double one_way(int rank, char* memory, int buffers, size_t bytes, cudaStream_t stream) {
    const int row = bytes > (32 << 20) ? 30 : 200, warm_up = 2, rounds = 9;
    const cudaEvent_t start = make_event(cudaEventDefault), end = make_event(cudaEventDefault);
    std::vector<double> us;
    for (int round = 0; round < warm_up + rounds; round++) {
        meeting.wait();
        CHECK(cudaEventRecord(start, stream));
        for (int i = 0; i < row; i++) {
            char* const buffer = memory + i % buffers * bytes;
            if (rank == FRONT) {
                CHECK(ncclSend(buffer, bytes, ncclUint8, PHASE_B, there[rank], stream));
            } else {
                CHECK(ncclRecv(buffer, bytes, ncclUint8, FRONT, there[rank], stream));
            }
        }
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaStreamSynchronize(stream));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, start, end));
        if (round >= warm_up) us.push_back(ms * 1e3 / row);
    }
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(end));
    return median(us);
}

// Microseconds from issuing a send to seeing that the answer has arrived.
static double round_trip(int rank, char* buffer, size_t bytes, cudaStream_t stream) {
    const int warm_up = 5, trips = 101;
    std::vector<double> us;
    meeting.wait();
    for (int trip = 0; trip < warm_up + trips; trip++) {
        const auto start = std::chrono::steady_clock::now();
        if (rank == FRONT) {
            CHECK(ncclSend(buffer, bytes, ncclUint8, PHASE_B, there[rank], stream));
            CHECK(ncclRecv(buffer, bytes, ncclUint8, PHASE_B, back[rank], stream));
        } else {
            CHECK(ncclRecv(buffer, bytes, ncclUint8, FRONT, there[rank], stream));
            CHECK(ncclSend(buffer, bytes, ncclUint8, FRONT, back[rank], stream));
        }
        CHECK(cudaStreamSynchronize(stream));
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
        if (trip >= warm_up) us.push_back(took.count());
    }
    return median(us);
}

static void bare_operations(int rank) {
    CHECK(cudaSetDevice(rank));
    const cudaStream_t stream = make_stream();
    char* const buffer = make_buffer(LARGEST);
    CHECK(cudaDeviceSynchronize());
    for (const size_t bytes : SIZES) {
        for (const int buffers : {1, SLOTS}) {
            if (buffers * bytes > LARGEST) continue;
            const double way = one_way(rank, buffer, buffers, bytes, stream);
            if (rank != FRONT) continue;
            std::printf("{\"what\":\"raw_nccl_one_way%s\",\"bytes\":%zu,\"us\":%.2f,\"gbytes_per_s\":%.1f}\n",
                        buffers == 1 ? "" : "_in_turn", bytes, way, bytes / way / 1e3);
        }
        const double trip = round_trip(rank, buffer, bytes, stream);
        if (rank != FRONT) continue;
        std::printf("{\"what\":\"raw_nccl_round_trip_host\",\"bytes\":%zu,\"us\":%.2f}\n", bytes, trip);
        std::fflush(stdout);
    }
    CHECK(cudaStreamSynchronize(stream));
    meeting.wait();
    CHECK(cudaFree(buffer));
    CHECK(cudaStreamDestroy(stream));
}

// --- the pipeline ---------------------------------------------------------------------------------------------------

__device__ unsigned long long now_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

__global__ void spin(unsigned long long ns) {
    const unsigned long long start = now_ns();
    while (now_ns() - start < ns) {
    }
}

// Milliseconds a chunk, as one rank sees it over the last three quarters: filling the pipe does not count.
static double period_ms(int rank, size_t bytes, double stage_ms, int chunks) {
    CHECK(cudaSetDevice(rank));
    const cudaStream_t in = make_stream(), work = make_stream(), out = make_stream();
    const unsigned long long stage_ns = static_cast<unsigned long long>(stage_ms * 1e6 + 0.5);
    // The front has both: what it sends, and what comes back. Phase B works in place.
    char *sent[SLOTS] = {}, *received[SLOTS] = {};
    for (int slot = 0; slot < SLOTS; slot++) {
        if (rank == FRONT) sent[slot] = make_buffer(bytes);
        received[slot] = make_buffer(bytes);
    }
    // An event for each chunk: none is recorded again while somebody may still wait for it.
    std::vector<cudaEvent_t> arrived(chunks), worked(chunks), left(chunks);
    for (auto* events : {&arrived, &worked, &left}) {
        for (cudaEvent_t& event : *events) event = make_event(cudaEventDisableTiming);
    }
    const cudaEvent_t start = make_event(cudaEventDefault), end = make_event(cudaEventDefault);
    // The driver loads a kernel when it is first launched; not with transfers under way.
    spin<<<1, 32, 0, work>>>(0);
    CHECK(cudaDeviceSynchronize());
    meeting.wait();

    for (int chunk = 0; chunk < chunks; chunk++) {
        const int slot = chunk % SLOTS, last = chunk - SLOTS;  // `last` had the slot before
        if (chunk >= AHEAD) CHECK(cudaEventSynchronize(worked[chunk - AHEAD]));
        if (rank == FRONT) {
            if (last >= 0) {
                CHECK(cudaStreamWaitEvent(out, worked[last], 0));
                CHECK(cudaStreamWaitEvent(in, worked[last], 0));
            }
            CHECK(ncclSend(sent[slot], bytes, ncclUint8, PHASE_B, there[rank], out));
            CHECK(ncclRecv(received[slot], bytes, ncclUint8, PHASE_B, back[rank], in));
        } else {
            if (last >= 0) CHECK(cudaStreamWaitEvent(in, left[last], 0));
            CHECK(ncclRecv(received[slot], bytes, ncclUint8, FRONT, there[rank], in));
        }
        CHECK(cudaEventRecord(arrived[chunk], in));
        CHECK(cudaStreamWaitEvent(work, arrived[chunk], 0));
        if (stage_ns > 0) spin<<<1, 32, 0, work>>>(stage_ns);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(worked[chunk], work));
        if (chunk == chunks / 4 - 1) CHECK(cudaEventRecord(start, work));
        if (rank == PHASE_B) {
            CHECK(cudaStreamWaitEvent(out, worked[chunk], 0));
            CHECK(ncclSend(received[slot], bytes, ncclUint8, FRONT, back[rank], out));
            CHECK(cudaEventRecord(left[chunk], out));
        }
    }
    CHECK(cudaEventRecord(end, work));
    CHECK(cudaDeviceSynchronize());
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, end));

    meeting.wait();
    for (auto* events : {&arrived, &worked, &left}) {
        for (const cudaEvent_t event : *events) CHECK(cudaEventDestroy(event));
    }
    for (const cudaEvent_t event : {start, end}) CHECK(cudaEventDestroy(event));
    for (const cudaStream_t stream : {in, work, out}) CHECK(cudaStreamDestroy(stream));
    for (int slot = 0; slot < SLOTS; slot++) {
        CHECK(cudaFree(sent[slot]));
        CHECK(cudaFree(received[slot]));
    }
    return ms / (chunks - chunks / 4);
}

static void pipeline(size_t bytes, double stage_ms) {
    const int chunks = stage_ms < 1 ? 1000 : stage_ms < 5 ? 400 : 200, runs = 3;
    std::vector<double> periods;
    for (int run = 0; run < runs; run++) {
        on_both_ranks([&](int rank) {
            const double period = period_ms(rank, bytes, stage_ms, chunks);
            if (rank == FRONT) periods.push_back(period);
        });
    }
    const double period = median(periods);
    std::printf("{\"what\":\"limit_pipeline\",\"bytes\":%zu,\"decode_ms\":%.2f,\"phase_b_ms\":%.2f,\"slots\":%d,"
                "\"chunks\":%d,\"runs\":%d,\"period_ms\":%.4f,\"efficiency\":%.4f}\n",
                bytes, stage_ms, stage_ms, SLOTS, chunks, runs, period, stage_ms / period);
    std::fflush(stdout);
}

int main() {
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    if (devices < 2) {
        std::fprintf(stderr, "nccl_limit: needs two GPUs, here are %d\n", devices);
        return 1;
    }
    const int both[] = {0, 1};
    CHECK(ncclCommInitAll(there, 2, both));
    CHECK(ncclCommInitAll(back, 2, both));
    on_both_ranks(bare_operations);
    for (const size_t bytes : PAYLOADS) {
        for (const double stage_ms : STAGES_MS) pipeline(bytes, stage_ms);
    }
    std::fflush(stdout);
    _exit(0);  // and with the process its communicators
}
