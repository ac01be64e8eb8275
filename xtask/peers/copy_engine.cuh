// The edge of copy_engine.cu: two processes that meet, slots on the receiver, messages by the copy engine, and figures.
// Where the second process is a CPU, slots in memory of the host.

#pragma once

#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

constexpr size_t ACTIVATION = 22118400, SMALL = 65536, LARGEST = size_t(1) << 30;
constexpr size_t STRIDE = 22 << 20;  // of the slots, which lie in one region with room for the largest message
constexpr unsigned SLOTS = 4;
constexpr double PATIENCE_S = 20, LIMIT_S = 170;

using Series = std::vector<double>;
using Work = std::function<void()>;

// --- the two processes ----------------------------------------------------------------------------------------------

struct alignas(128) Word {
    volatile unsigned value;
};

// What both processes and the first one share. GPUs write to the first page alone.
struct Shared {
    Word arrived[2];  // the number of the last message that has arrived at this rank: its peer's copy stream writes it
    Word credit[2];   // how many messages this rank is done with: a stream of its own writes it
    Word gone[2];     // whether this rank has ended
    alignas(4096) std::atomic<unsigned> waiting, round;
    size_t count[2];
    double values[2][4096];  // what one rank tells the other
};

static Shared* shared;
static int rank_ = -1, gpus = 0;  // 0 until this rank opens its GPU
static const char* part = "start";

[[noreturn]] static void die(const char* call, int line, const char* why) {
    std::fflush(stdout);
    std::fprintf(stderr, "copy_engine.cu:%d: rank %d, %s: %s: %s\n", line, rank_, part, call, why);
    _exit(1);
}
static void check(cudaError_t error, const char* call, int line) {
    if (error != cudaSuccess) die(call, line, cudaGetErrorString(error));
}
static void check(CUresult error, const char* call, int line) {
    const char* why = "unknown error";
    if (error != CUDA_SUCCESS) {
        cuGetErrorString(error, &why);
        die(call, line, why);
    }
}
static void check(cublasStatus_t status, const char* call, int line) {
    if (status != CUBLAS_STATUS_SUCCESS) die(call, line, cublasGetStatusString(status));
}
static void check(bool success, const char* call, int line) {
    if (!success) die(call, line, std::strerror(errno));
}
#define CHECK(call) check(call, #call, __LINE__)

static double now_us() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::micro>(now).count();
}

// Every wait of a host: ends this process where the peer has ended or the time is over.
template <typename Condition>
static void until(Condition condition) {
    const double start = now_us();
    for (unsigned turn = 1; !condition(); turn++) {
        if (turn % 4096 > 0) continue;
        if (shared->gone[1 - rank_].value && !condition()) die("wait", __LINE__, "the other process has ended");
        if (now_us() - start > PATIENCE_S * 1e6) die("wait", __LINE__, "not in time");
    }
}

// Both processes meet here.
static void meet() {
    const unsigned now = shared->round;
    if (++shared->waiting == 2) {
        shared->waiting = 0;
        ++shared->round;
    } else {
        until([&] { return shared->round != now; });
    }
}

// Both ranks give a series and get that of the other.
static Series exchange(const Series& own) {
    shared->count[rank_] = std::min(own.size(), sizeof shared->values[0] / sizeof(double));
    std::copy_n(own.begin(), shared->count[rank_], shared->values[rank_]);
    meet();
    const Series other(shared->values[1 - rank_], shared->values[1 - rank_] + shared->count[1 - rank_]);
    meet();
    return other;
}

// --- figures --------------------------------------------------------------------------------------------------------

static double at(Series values, double share) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    return values[std::min(values.size() - 1, size_t(share * values.size()))];
}
static double median(const Series& values) { return at(values, 0.5); }
static double mean(const Series& values) {
    double sum = 0;
    for (const double value : values) sum += value;
    return values.empty() ? 0 : sum / values.size();
}

__attribute__((format(printf, 1, 2))) static std::string text(const char* format, ...) {
    char buffer[1024];
    va_list rest;
    va_start(rest, format);
    std::vsnprintf(buffer, sizeof buffer, format, rest);
    va_end(rest);
    return buffer;
}

// `"us":1.0,"us_mean":…`
static std::string figures(const char* name, const Series& values) {
    std::string line = text("\"%s\":%.4f,\"%s_mean\":%.4f", name, median(values), name, mean(values));
    const std::pair<const char*, double> others[] = {{"p10", 0.1}, {"p90", 0.9}, {"p99", 0.99}, {"worst", 1}};
    for (const auto& [suffix, share] : others) line += text(",\"%s_%s\":%.4f", name, suffix, at(values, share));
    return line;
}

static void print(const char* what, const std::string& fields) {
    if (rank_ == 0) std::printf("{\"what\":\"copy_engine_%s\",%s,\"gpus\":%d}\n", what, fields.c_str(), gpus);
    std::fflush(stdout);
}

// --- kernels --------------------------------------------------------------------------------------------------------

__device__ unsigned long long now_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

// The work of `pp bench overlap`: crates/pp-kernels/kernels/spin.cu.
__global__ void spin(unsigned long long ns) {
    const unsigned long long start = now_ns();
    while (now_ns() - start < ns) __nanosleep(20);
}

__device__ size_t first() { return blockIdx.x * size_t(blockDim.x) + threadIdx.x; }
__device__ size_t stride() { return size_t(gridDim.x) * blockDim.x; }

// A memory stream: that of `pp bench overlap`, crates/pp-kernels/kernels/hbm.cu.
__global__ void __launch_bounds__(512)
    memory_stream(const uint4* __restrict__ from, uint4* __restrict__ to, size_t count, unsigned repeats) {
    for (unsigned pass = 0; pass < repeats; pass++) {
        size_t i = first();
        for (; i + 3 * stride() < count; i += 4 * stride()) {
            const uint4 a = __ldcs(from + i), b = __ldcs(from + i + stride());
            const uint4 c = __ldcs(from + i + 2 * stride()), d = __ldcs(from + i + 3 * stride());
            __stcs(to + i, a);
            __stcs(to + i + stride(), b);
            __stcs(to + i + 2 * stride(), c);
            __stcs(to + i + 3 * stride(), d);
        }
        for (; i < count; i += stride()) __stcs(to + i, __ldcs(from + i));
    }
}

__device__ unsigned mixed(unsigned x) {
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

__global__ void fill_with_noise(__nv_bfloat16* to, size_t count, unsigned seed) {
    for (size_t i = first(); i < count; i += stride()) {
        to[i] = __float2bfloat16(float(mixed(unsigned(i) * 2654435761u ^ seed)) / 2147483648.f - 1.f);
    }
}

// The contents of a message: a function of its number, its sender and the offset.
__device__ unsigned content(unsigned number, unsigned sender, size_t i) {
    return mixed((number * 2 + sender) * 2654435761u ^ unsigned(i));
}
__global__ void write_content(unsigned* to, size_t count, unsigned number, unsigned sender) {
    for (size_t i = first(); i < count; i += stride()) to[i] = content(number, sender, i);
}
// Counts what is wrong, and poisons what it has read.
__global__ void check_content(unsigned* from, size_t count, unsigned number, unsigned sender,
                              unsigned long long* wrong) {
    unsigned here = 0;
    for (size_t i = first(); i < count; i += stride()) {
        here += from[i] != content(number, sender, i);
        from[i] = 0xdeadbeef;
    }
    if (here > 0) atomicAdd(wrong, static_cast<unsigned long long>(here));
}

constexpr unsigned BLOCKS = 264, THREADS = 512;

// --- the edge -------------------------------------------------------------------------------------------------------

// `slots` are this rank's, `remote` the peer's, `source` is what messages are sent from.
static CUdeviceptr slots, remote, source, page;
// Kernels; messages and their numbers; credits.
static cudaStream_t stage, copies, side;
static cudaEvent_t worked[SLOTS], begun, ended;
static Series issued;  // what each send took the thread that issued it, in microseconds
static int device, peer, processors;
static double context_ms;

// The first calls of CUDA in this process.
static void open_gpu() {
    part = "open";
    const double start = now_us();
    CHECK(cuInit(0));
    CHECK(cudaGetDeviceCount(&gpus));
    gpus = std::min(gpus, 2);
    device = gpus > 1 ? rank_ : 0, peer = gpus > 1 ? 1 - rank_ : 0;
    CHECK(cudaSetDevice(device));
    CHECK(cudaFree(nullptr));
    context_ms = (now_us() - start) / 1e3;
    for (cudaStream_t* stream : {&stage, &copies, &side}) {
        CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    }
    for (cudaEvent_t& event : worked) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (cudaEvent_t* event : {&begun, &ended}) CHECK(cudaEventCreate(event));
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    CHECK(cuMemAlloc(&source, LARGEST));
    auto* const noise = reinterpret_cast<__nv_bfloat16*>(source);
    fill_with_noise<<<BLOCKS, THREADS, 0, stage>>>(noise, LARGEST / 2, 7);
    // The driver loads a kernel when it is first launched; not with transfers under way.
    spin<<<1, 32, 0, stage>>>(0);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
}

static CUdeviceptr mapped(CUmemGenericAllocationHandle memory) {
    CUdeviceptr address;
    CHECK(cuMemAddressReserve(&address, LARGEST, 0, 0, 0));
    CHECK(cuMemMap(address, LARGEST, 0, memory, 0));
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECK(cuMemSetAccess(address, LARGEST, &access, 1));
    return address;
}

// Sends a descriptor and returns the peer's.
static int exchange_fd(int socket, int fd) {
    char byte = 'f';
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
    iovec vector{&byte, 1};
    msghdr message{};
    message.msg_iov = &vector, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    CHECK(sendmsg(socket, &message, 0) == 1);
    std::memset(control, 0, sizeof control);
    message.msg_controllen = sizeof control;
    CHECK(recvmsg(socket, &message, MSG_CMSG_CLOEXEC) == 1);
    header = CMSG_FIRSTHDR(&message);
    CHECK(header != nullptr && header->cmsg_type == SCM_RIGHTS);
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

static void connect(int socket) {
    part = "connect";
    double start = now_us();
    const auto step_ms = [&] {
        const double before = start;
        start = now_us();
        return (start - before) / 1e3;
    };

    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle own, theirs;
    CHECK(cuMemCreate(&own, LARGEST, &properties, 0));
    slots = mapped(own);
    int fd;
    CHECK(cuMemExportToShareableHandle(&fd, own, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    const double made_ms = step_ms();
    const int got = exchange_fd(socket, fd);
    close(fd);
    step_ms();
    void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(got));
    CHECK(cuMemImportFromShareableHandle(&theirs, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(got);
    remote = mapped(theirs);
    const double imported_ms = step_ms();
    CHECK(cuMemHostRegister(shared, 4096, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
    CHECK(cuMemHostGetDevicePointer(&page, shared, 0));
    const double registered_ms = step_ms();
    CHECK(cudaMemsetAsync(reinterpret_cast<void*>(slots), 0, LARGEST, stage));
    CHECK(cudaDeviceSynchronize());

    int driver = 0, native = 0, engines = 0;
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaDeviceGetAttribute(&engines, cudaDevAttrAsyncEngineCount, device));
    if (device != peer) {
        CHECK(cuDeviceGetP2PAttribute(&native, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, device, peer));
    }
    const std::string about = text("\"driver\":%d,\"copy_engines\":%d,\"native_atomics\":%d,", driver, engines, native);
    print("set_up", about + text("\"context_ms\":%.1f,\"slots_made_ms\":%.2f,\"slots_imported_ms\":%.2f,\"page_registered_ms\":%.2f",
                                 context_ms, made_ms, imported_ms, registered_ms));
    meet();
}

static void write(Word& word, unsigned value, cudaStream_t stream) {
    const size_t offset = reinterpret_cast<char*>(&word) - reinterpret_cast<char*>(shared);
    CHECK(cuStreamWriteValue32(stream, page + offset, value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

static void copy(unsigned slot, size_t bytes) {
    CHECK(cuMemcpyDtoDAsync(remote + slot * STRIDE, source + slot * STRIDE, bytes, copies));
}

// Sends message `number` behind the work that is on the stage's stream.
static void send(unsigned number, size_t bytes) {
    const double start = now_us();
    const unsigned slot = number % SLOTS;
    CHECK(cudaEventRecord(worked[slot], stage));
    CHECK(cudaStreamWaitEvent(copies, worked[slot], 0));
    copy(slot, bytes);
    write(shared->arrived[1 - rank_], number + 1, copies);
    issued.push_back(now_us() - start);
}

// Gives the slot of message `number` back behind the work that is on the stage's stream.
static void give_back(unsigned number, bool recorded) {
    const unsigned slot = number % SLOTS;
    if (!recorded) CHECK(cudaEventRecord(worked[slot], stage));
    CHECK(cudaStreamWaitEvent(side, worked[slot], 0));
    write(shared->credit[rank_], number + 1, side);
}

// Both ranks begin anew: nothing is under way, all numbers are 0.
static void restart() {
    if (gpus > 0) CHECK(cudaDeviceSynchronize());
    meet();
    shared->arrived[rank_].value = shared->credit[rank_].value = 0;
    issued.clear();
    meet();
}

template <typename Enqueue>
static double timed_ms(cudaStream_t stream, Enqueue enqueue) {
    float ms;
    CHECK(cudaEventRecord(begun, stream));
    enqueue();
    CHECK(cudaEventRecord(ended, stream));
    CHECK(cudaEventSynchronize(ended));
    CHECK(cudaEventElapsedTime(&ms, begun, ended));
    return ms;
}

// --- a CPU beside a GPU ---------------------------------------------------------------------------------------------

// Rank 1 is the CPU and calls no CUDA. Both ranks map the slots, four for each way; rank 0 page-locks them and copies
// between them and its GPU, in on one stream and out on another.
constexpr size_t HOST_BYTES = 2 * SLOTS * STRIDE;
static char *host_slots, *untouched;  // as many bytes that no process has touched
static cudaEvent_t is_in[SLOTS], is_out[SLOTS];

// Memory of this process and of those that it starts.
static void* shared_memory(size_t bytes) {
    const int memory = memfd_create("copy_engine", MFD_CLOEXEC);
    CHECK(memory >= 0 && ftruncate(memory, off_t(bytes)) == 0);
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    CHECK(at != MAP_FAILED);
    close(memory);
    return at;
}

static void copy_in(unsigned slot, size_t bytes) {
    CHECK(cuMemcpyHtoDAsync(source + slot * STRIDE, host_slots + slot * STRIDE, bytes, copies));
}
static void copy_out(unsigned slot, size_t bytes) {
    CHECK(cuMemcpyDtoHAsync(host_slots + (SLOTS + slot) * STRIDE, source + (SLOTS + slot) * STRIDE, bytes, side));
}

// Takes chunk `number` through the GPU: in, the work, and out.
static void through_gpu(unsigned number, size_t bytes, const Work& work) {
    const unsigned slot = number % SLOTS;
    copy_in(slot, bytes);
    CHECK(cudaEventRecord(is_in[slot], copies));
    CHECK(cudaStreamWaitEvent(stage, is_in[slot], 0));
    work();
    CHECK(cudaEventRecord(worked[slot], stage));
    CHECK(cudaStreamWaitEvent(side, worked[slot], 0));
    copy_out(slot, bytes);
    CHECK(cudaEventRecord(is_out[slot], side));
}

// Whether chunk `number` is back in memory of the host.
static bool is_back(unsigned number) {
    // The runtime would keep "not ready" as the last error.
    const CUresult status = cuEventQuery(is_out[number % SLOTS]);
    if (status != CUDA_ERROR_NOT_READY) CHECK(status);
    return status == CUDA_SUCCESS;
}
