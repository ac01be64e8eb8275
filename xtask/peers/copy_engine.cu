// The hand-written limit of edges by copy engine: what two processes on two GPUs of one host, on one GPU that both share,
// or on a CPU and a GPU reach with nothing around them when no GPU waits for a peer. No program can be faster there by more
// than noise.
//
//     nvcc -O2 -std=c++17 -arch=native -o copy_engine copy_engine.cu -lcuda -lcublas && ./copy_engine [PART...]
//
// PART is cpu, check, pipeline, one_way, round_trip, issue, cost or chain; all of them unless told. The slots are memory of
// the receiver: made by cuMemCreate, exported as a file descriptor over a Unix socket, mapped by the sender. A message
// is one copy into a slot and, behind it on the same stream, one cuStreamWriteValue32 of its number into page-locked
// memory that both processes share. The receiver's stream writes a credit there in the same way, from a stream of its
// own behind the work that read the slot. Hosts alone read the numbers.
//
// In the part cpu the second process is a CPU and has not called CUDA. The slots are memory that both processes map. The
// process with the GPU page-locks them, copies chunks in and out on two streams around its work, and tells the other by
// a number which chunks are back.
//
// Prints one JSON object for each line. A figure is the median; the names that end in _mean, _p10, _p90, _p99 and _worst
// say the rest. Ends within three minutes: no wait is without a limit, and the first process, which never calls CUDA,
// ends what is late. On a machine with one GPU both processes use it, with or without MPS, and the figures say so ("gpus": 1).
// Unless told it runs only cpu, check and round_trip there, and names what it leaves out.

#include "copy_engine.cuh"

// --- work -----------------------------------------------------------------------------------------------------------

static Work spinning(double ms) {
    const auto ns = static_cast<unsigned long long>(ms * 1e6 + 0.5);
    return [ns] {
        if (ns == 0) return;
        spin<<<32, 32, 0, stage>>>(ns);
        CHECK(cudaGetLastError());
    };
}

// How many units of work take so long; both ranks take what rank 0 finds.
static unsigned calibrated(double ms, const std::function<void(unsigned)>& launch) {
    unsigned units = 1;
    if (gpus > 0) timed_ms(stage, [&] { launch(units); });
    for (int turn = 0; turn < 4 && gpus > 0; turn++) {
        Series taken;
        for (int i = 0; i < 3; i++) taken.push_back(timed_ms(stage, [&] { launch(units); }));
        units = std::max(1u, unsigned(std::lround(units * ms / median(taken))));
    }
    const Series other = exchange({double(units)});
    return rank_ == 0 ? units : unsigned(other[0]);
}

// Memory that lives as long as the process.
static void* noise(size_t bytes, unsigned seed) {
    void* memory;
    CHECK(cudaMalloc(&memory, bytes));
    fill_with_noise<<<BLOCKS, THREADS, 0, stage>>>(static_cast<__nv_bfloat16*>(memory), bytes / 2, seed);
    CHECK(cudaGetLastError());
    return memory;
}

static void stream_memory(unsigned repeats) {
    constexpr size_t BYTES = 64 << 20;
    static auto* const from = static_cast<uint4*>(noise(BYTES, 3));
    static auto* const to = static_cast<uint4*>(noise(BYTES, 4));
    memory_stream<<<4 * processors, 512, 0, stage>>>(from, to, BYTES / sizeof(uint4), repeats);
    CHECK(cudaGetLastError());
}

static cublasHandle_t made_cublas() {
    cublasHandle_t handle;
    CHECK(cublasCreate(&handle));
    CHECK(cublasSetStream(handle, stage));
    return handle;
}

// Products of bf16 matrices of 2048 rows and columns, as in `pp bench overlap`.
static void multiply(unsigned repeats) {
    constexpr int SIZE = 2048;
    static const cublasHandle_t handle = made_cublas();
    constexpr auto TYPE = CUDA_R_16BF;
    static void *const a = noise(2 * SIZE * SIZE, 1), *const b = noise(2 * SIZE * SIZE, 2);
    static void* const d = noise(2 * SIZE * SIZE, 5);
    const float one = 1, zero = 0;
    for (unsigned i = 0; i < repeats; i++) {
        CHECK(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, SIZE, SIZE, SIZE, &one, a, TYPE, SIZE, b, TYPE, SIZE, &zero, d,
                           TYPE, SIZE, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }
}

// --- parts ----------------------------------------------------------------------------------------------------------

// Messages both ways at once; a kernel of the receiver compares every word.
static void check_order() {
    constexpr unsigned MESSAGES = 400;
    unsigned long long *wrong, here = 0;
    CHECK(cudaMalloc(&wrong, sizeof here));
    CHECK(cudaMemset(wrong, 0, sizeof here));
    restart();
    unsigned sent = 0, taken = 0;
    until([&] {
        if (sent < MESSAGES && sent - shared->credit[1 - rank_].value < SLOTS) {
            auto* const to = reinterpret_cast<unsigned*>(source + sent % SLOTS * STRIDE);
            write_content<<<BLOCKS, THREADS, 0, stage>>>(to, ACTIVATION / 4, sent, rank_);
            send(sent++, ACTIVATION);
        }
        if (shared->arrived[rank_].value != taken) {
            auto* const from = reinterpret_cast<unsigned*>(slots + taken % SLOTS * STRIDE);
            check_content<<<BLOCKS, THREADS, 0, side>>>(from, ACTIVATION / 4, taken, 1 - rank_, wrong);
            CHECK(cudaGetLastError());
            write(shared->credit[rank_], ++taken, side);
        }
        return taken == MESSAGES && shared->credit[1 - rank_].value == MESSAGES;
    });
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&here, wrong, sizeof here, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(wrong));
    const double both = double(here) + exchange({double(here)})[0];
    print("check", text("\"bytes\":%zu,\"messages_each_way\":%u,\"wrong_words\":%.0f", ACTIVATION, MESSAGES, both));
    if (both > 0) die("check", __LINE__, "words are wrong");
}

// Rank 0 sends a message when the one four before it is done; rank 1 works on it and sends as much back; rank 0 works on
// that. Gives rank 0 the milliseconds between the ends of two messages, from the second quarter on.
static Series there_and_back(const Work& work, size_t bytes, unsigned messages) {
    restart();
    Series ends;
    if (rank_ == 0) {
        unsigned sent = 0, taken = 0;
        until([&] {
            while (ends.size() < shared->credit[0].value) ends.push_back(now_us());
            const unsigned done = unsigned(ends.size());
            if (sent < messages && sent - done < SLOTS && sent - shared->credit[1].value < SLOTS) send(sent++, bytes);
            if (shared->arrived[0].value != taken) {
                work();
                give_back(taken++, false);
            }
            return done == messages;
        });
    } else {
        for (unsigned got = 0; got < messages; got++) {
            until([&] { return shared->arrived[1].value > got && got - shared->credit[0].value < SLOTS; });
            work();
            send(got, bytes);
            give_back(got, true);
        }
    }
    CHECK(cudaDeviceSynchronize());
    meet();
    Series distances;
    for (size_t i = messages / 4 + 1; i < ends.size(); i++) distances.push_back((ends[i] - ends[i - 1]) / 1e3);
    return distances;
}

static void pipeline() {
    const struct {
        size_t bytes;
        double ms;
        unsigned messages;
    } cases[] = {{SMALL, 0, 2000},      {ACTIVATION, 0, 1000}, {ACTIVATION, 0.2, 1000},
                 {ACTIVATION, 1, 400}, {ACTIVATION, 5, 100}};
    for (const auto& [bytes, ms, messages] : cases) {
        constexpr int RUNS = 5;
        const Work work = spinning(ms);
        work();
        const double alone = timed_ms(stage, [&] { for (int i = 0; i < 50; i++) work(); }) / 50;
        Series periods, sends;
        for (int run = 0; run < RUNS; run++) {
            const Series some = there_and_back(work, bytes, messages);
            periods.insert(periods.end(), some.begin(), some.end());
            sends.insert(sends.end(), issued.begin() + messages / 4, issued.end());
        }
        if (rank_ > 0) continue;
        const std::string what = text("\"bytes\":%zu,\"decode_ms\":%.2f,\"phase_b_ms\":%.2f,\"slots\":%u,\"chunks\":%u,\"runs\":%d,",
                                      bytes, ms, ms, SLOTS, messages, RUNS);
        const std::string shares = text(",\"kernels_alone_ms\":%.4f,\"efficiency\":%.4f,\"efficiency_by_mean\":%.4f", alone,
                                        ms / median(periods), ms / mean(periods));
        print("pipeline", what + figures("period_ms", periods) + "," + figures("send_us", sends) + shares);
    }
}

// Messages of one direction. First as a row behind a spinning kernel, each with its number and timed by events: one buffer
// stays in the GPU's cache, four in turn do not. Then with credits, as the host of the receiver sees them arrive.
static void one_way() {
    for (const size_t bytes : {size_t(4), SMALL, size_t(1) << 20, ACTIVATION, LARGEST}) {
        for (const unsigned buffers : {1u, SLOTS}) {
            if (buffers * bytes > LARGEST) continue;
            Series us;
            restart();
            const int row = bytes > ACTIVATION ? 8 : 100;
            for (int run = 0; run < 20 && rank_ == 0; run++) {
                spin<<<1, 32, 0, copies>>>(row * 10000 + 50000);
                CHECK(cudaGetLastError());
                const double ms = timed_ms(copies, [&] {
                    for (int i = 0; i < row; i++) {
                        copy(i % buffers, bytes);
                        write(shared->arrived[1], i + 1, copies);
                    }
                });
                us.push_back(ms * 1e3 / row);
            }
            if (rank_ > 0) continue;
            const double rate = bytes / median(us) / 1e3;
            print("one_way", text("\"bytes\":%zu,\"buffers\":%u,\"gbytes_per_s\":%.1f,", bytes, buffers, rate) + figures("us", us));
        }
    }
    for (const size_t bytes : {SMALL, ACTIVATION}) {
        constexpr unsigned MESSAGES = 2000;
        restart();
        Series arrivals, us;
        if (rank_ == 0) {
            for (unsigned sent = 0; sent < MESSAGES; sent++) {
                until([&] { return sent - shared->credit[1].value < SLOTS; });
                send(sent, bytes);
            }
        } else {
            while (arrivals.size() < MESSAGES) {
                until([&] { return shared->arrived[1].value > arrivals.size(); });
                arrivals.push_back(now_us());
                shared->credit[1].value = unsigned(arrivals.size());
            }
        }
        for (size_t i = MESSAGES / 4; i + 1 < arrivals.size(); i++) us.push_back(arrivals[i + 1] - arrivals[i]);
        const Series seen = exchange(us);
        if (rank_ == 0) print("one_way_with_credits", text("\"bytes\":%zu,", bytes) + figures("us", seen));
    }
}

// What there is to say of round trips, with their halves: what one way takes.
static std::string trips(const Series& us) {
    const double middle = median(us), late = at(us, 0.99);
    return text("\"ms\":%.5f,\"ms_p99\":%.5f,\"half_us\":%.3f,\"half_us_p99\":%.3f,", middle / 1e3, late / 1e3, middle / 2, late / 2) +
           figures("us", us);
}

// From the beginning of a send to the arrival of as many bytes back, as a host sees it.
static void round_trip() {
    for (const bool behind : {false, true}) {
        for (const size_t bytes : {size_t(4), ACTIVATION}) {
            constexpr unsigned WARM_UP = 100, TRIPS = 1500;
            restart();
            Series us;
            for (unsigned trip = 0; trip < WARM_UP + TRIPS; trip++) {
                const double start = now_us();
                if (rank_ == 1) until([&] { return shared->arrived[1].value > trip; });
                if (behind) {
                    spin<<<32, 32, 0, stage>>>(100);
                    send(trip, bytes);
                } else {
                    copy(trip % SLOTS, bytes);
                    write(shared->arrived[1 - rank_], trip + 1, copies);
                }
                if (rank_ == 0) until([&] { return shared->arrived[0].value > trip; });
                if (trip >= WARM_UP) us.push_back(now_us() - start);
            }
            print("round_trip", text("\"bytes\":%zu,\"behind_a_kernel\":%s,", bytes, behind ? "true" : "false") + trips(us));
        }
    }
}

// What one send costs the thread that issues it, while a kernel holds the stream and while nothing does.
static void issue() {
    for (const bool held : {true, false}) {
        for (const size_t bytes : {size_t(4), ACTIVATION}) {
            restart();
            constexpr unsigned ROW = 24;
            for (unsigned run = 0; run < 60 && rank_ == 0; run++) {
                if (held) spin<<<1, 32, 0, copies>>>(1000000);
                CHECK(cudaGetLastError());
                for (unsigned i = 0; i < ROW; i++) {
                    send(i, bytes);
                    if (!held) CHECK(cudaStreamSynchronize(copies));
                }
                CHECK(cudaStreamSynchronize(copies));
            }
            if (rank_ > 0) continue;
            const Series warm(issued.begin() + 5 * ROW, issued.end());
            print("issue", text("\"bytes\":%zu,\"stream\":\"%s\",", bytes, held ? "held" : "idle") + figures("us", warm));
        }
    }
}

// What a transfer each way costs stages of 2 ms: pairs of runs, one with few bytes and one with an activation, in turns.
// `period_ms` makes a run and gives its mean period.
template <typename Period>
static void compare(const char* what, unsigned pairs, size_t few, Period period_ms) {
    const std::pair<const char*, void (*)(unsigned)> works[] = {{"hbm", stream_memory}, {"gemm", multiply}};
    for (const auto& [name, launch] : works) {
        const unsigned units = calibrated(2, launch);
        const Work work = [&, launch = launch] { launch(units); };
        for (int warm_up = 0; warm_up < 2; warm_up++) period_ms(work, ACTIVATION);
        Series little, much, ratios;
        for (unsigned pair = 0; pair < pairs; pair++) {
            double ms[2];
            for (const unsigned turn : {pair % 2, 1 - pair % 2}) ms[turn] = period_ms(work, turn ? ACTIVATION : few);
            little.push_back(ms[0]);
            much.push_back(ms[1]);
            ratios.push_back(ms[1] / ms[0]);
        }
        if (rank_ > 0) continue;
        const std::string about = text("\"work\":\"%s\",\"units\":%u,\"bytes\":%zu,\"pairs\":%u,", name, units, ACTIVATION, pairs);
        const std::string of_few = figures(text("period_of_%zu_bytes_ms", few).c_str(), little);
        print(what, about + figures("ratio", ratios) + "," + figures("period_ms", much) + "," + of_few);
    }
}

constexpr unsigned ROW_OF_COST = 48;

static void cost() {
    compare("cost", 36, 64, [](const Work& work, size_t bytes) { return mean(there_and_back(work, bytes, ROW_OF_COST)); });
}

// Two parts of 5 ms of matrix products with an activation from one to the other: the period over the longer part, both by
// events of the same run.
static void chain() {
    constexpr unsigned RUNS = 10, MESSAGES = 60;
    const unsigned units = calibrated(5, multiply);
    std::vector<cudaEvent_t> before(MESSAGES), after(MESSAGES);
    for (auto* events : {&before, &after}) {
        for (cudaEvent_t& event : *events) CHECK(cudaEventCreate(&event));
    }
    const auto elapsed = [](cudaEvent_t from, cudaEvent_t to) {
        float ms;
        CHECK(cudaEventElapsedTime(&ms, from, to));
        return double(ms);
    };
    Series ratios, by_mean, periods, longer;
    for (unsigned run = 0; run < RUNS; run++) {
        restart();
        for (unsigned message = 0; message < MESSAGES; message++) {
            until([&] {
                return rank_ == 0 ? message - shared->credit[1].value < SLOTS : shared->arrived[1].value > message;
            });
            CHECK(cudaEventRecord(before[message], stage));
            multiply(units);
            CHECK(cudaEventRecord(after[message], stage));
            if (rank_ == 0) send(message, ACTIVATION);
            else give_back(message, false);
        }
        CHECK(cudaDeviceSynchronize());
        Series own, distances;
        for (unsigned message = MESSAGES / 4; message < MESSAGES; message++) {
            own.push_back(elapsed(before[message], after[message]));
            distances.push_back(elapsed(after[message - 1], after[message]));
        }
        const Series other = exchange(own), last = exchange(distances);
        longer.push_back(std::max(median(own), median(other)));
        periods.push_back(median(last));
        ratios.push_back(periods.back() / longer.back());
        by_mean.push_back(mean(last) / std::max(mean(own), mean(other)));
    }
    if (rank_ > 0) return;
    const std::string what = text("\"bytes\":%zu,\"units\":%u,\"runs\":%u,\"chunks\":%u,\"efficiency\":%.4f,", ACTIVATION, units, RUNS,
                                  MESSAGES, 1 / median(ratios));
    print("chain", what + figures("ratio", ratios) + "," + figures("ratio_of_means", by_mean) + "," +
                       figures("period_ms", periods) + "," + figures("longer_part_ms", longer));
}

// --- a CPU beside a GPU ---------------------------------------------------------------------------------------------

// How long it takes to page-lock all slots: memory that no process has touched, memory that the CPU has touched, and that
// once more. They stay locked.
static void page_lock() {
    constexpr unsigned FLAGS = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    if (rank_ == 1) std::memset(host_slots, 1, HOST_BYTES);
    meet();
    if (rank_ == 1) return;
    const std::pair<const char*, char*> memories[] = {{"first", untouched}, {"touched", host_slots}, {"again", host_slots}};
    for (const auto& [state, memory] : memories) {
        const double start = now_us();
        CHECK(cuMemHostRegister(memory, HOST_BYTES, FLAGS));
        const double locked = now_us();
        CHECK(cuMemHostUnregister(memory));
        const std::string what = text("\"memory\":\"%s\",\"bytes\":%zu,\"slots\":%u,", state, HOST_BYTES, 2 * SLOTS);
        print("cpu_page_lock", what + text("\"ms\":%.2f,\"unlock_ms\":%.2f", (locked - start) / 1e3, (now_us() - locked) / 1e3));
    }
    CHECK(cuMemHostRegister(host_slots, HOST_BYTES, FLAGS));
    for (auto* events : {&is_in, &is_out}) {
        for (cudaEvent_t& event : *events) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
}

// Copies in, out, and both ways at once, four slots in turn.
static void cpu_copies() {
    if (rank_ > 0) return;
    constexpr unsigned ROW = 16, RUNS = 20;
    const struct {
        const char* name;
        bool in, out;
    } ways[] = {{"in", true, false}, {"out", false, true}, {"both", true, true}};
    for (const auto& way : ways) {
        Series us;
        for (unsigned run = 0; run < RUNS; run++) {
            const double start = now_us();
            for (unsigned i = 0; i < ROW; i++) {
                if (way.in) copy_in(i % SLOTS, ACTIVATION);
                if (way.out) copy_out(i % SLOTS, ACTIVATION);
            }
            CHECK(cudaDeviceSynchronize());
            us.push_back((now_us() - start) / ROW);
        }
        const double rate = ACTIVATION / median(us) / 1e3;
        print("cpu_copy", text("\"bytes\":%zu,\"way\":\"%s\",\"gbytes_per_s\":%.1f,", ACTIVATION, way.name, rate) + figures("us", us));
    }
}

// From the CPU's number through a copy in, a kernel and a copy out to the number that answers it, one chunk at a time.
static void cpu_round_trip(size_t bytes, unsigned count) {
    constexpr unsigned WARM_UP = 100;
    const Work work = spinning(0.0001);
    restart();
    Series us;
    for (unsigned trip = 0; trip < WARM_UP + count; trip++) {
        if (rank_ == 1) {
            const double start = now_us();
            shared->arrived[0].value = trip + 1;
            until([&] { return shared->arrived[1].value > trip; });
            if (trip >= WARM_UP) us.push_back(now_us() - start);
        } else {
            until([&] { return shared->arrived[0].value > trip; });
            through_gpu(trip, bytes, work);
            until([&] { return is_back(trip); });
            shared->arrived[1].value = trip + 1;
        }
    }
    print("cpu_round_trip", text("\"bytes\":%zu,", bytes) + trips(exchange(us)));
}

// The CPU sends a chunk when the one four before it is done, and works as long as the GPU on each that is back. Gives rank
// 0 the milliseconds between the ends of two works, from the second quarter on.
static Series beside_a_gpu(double ms, unsigned messages) {
    const Work work = spinning(ms);
    restart();
    Series ends, distances;
    if (rank_ == 1) {
        for (unsigned taken = 0; taken < messages; taken++) {
            shared->arrived[0].value = std::min(messages, taken + SLOTS);
            until([&] { return shared->arrived[1].value > taken; });
            for (const double end = now_us() + ms * 1e3; now_us() < end;) continue;
            ends.push_back(now_us());
        }
    } else {
        unsigned taken = 0, done = 0;
        until([&] {
            if (shared->arrived[0].value > taken) through_gpu(taken++, ACTIVATION, work);
            if (done < taken && is_back(done)) shared->arrived[1].value = ++done;
            return done == messages;
        });
    }
    for (size_t i = messages / 4 + 1; i < ends.size(); i++) distances.push_back((ends[i] - ends[i - 1]) / 1e3);
    return exchange(distances);
}

static void cpu_pipeline() {
    constexpr int RUNS = 3;
    const std::pair<double, unsigned> cases[] = {{5, 120}, {1, 400}, {0.5, 800}};
    for (const auto& [ms, messages] : cases) {
        Series periods;
        for (int run = 0; run < RUNS; run++) {
            const Series some = beside_a_gpu(ms, messages);
            periods.insert(periods.end(), some.begin(), some.end());
        }
        if (rank_ > 0) continue;
        const std::string what = text("\"bytes\":%zu,\"stage_ms\":%g,\"slots\":%u,\"chunks\":%u,\"runs\":%d,", ACTIVATION, ms, SLOTS,
                                      messages, RUNS);
        const std::string shares = text(",\"efficiency\":%.4f,\"efficiency_by_mean\":%.4f", ms / median(periods), ms / mean(periods));
        print("cpu_pipeline", what + figures("period_ms", periods) + shares);
    }
}

// The mean period of a GPU whose chunks come and go while it works, all of them enqueued ahead.
static double enqueued_ahead(const Work& work, size_t bytes) {
    if (rank_ > 0) return 1;
    const auto enqueue = [&](unsigned chunks) {
        for (unsigned number = 0; number < chunks; number++) {
            CHECK(cudaStreamWaitEvent(copies, worked[number % SLOTS], 0));
            CHECK(cudaStreamWaitEvent(stage, is_out[number % SLOTS], 0));
            through_gpu(number, bytes, work);
        }
    };
    enqueue(SLOTS);
    const double ms = timed_ms(stage, [&] { enqueue(ROW_OF_COST); });
    CHECK(cudaDeviceSynchronize());
    return ms / ROW_OF_COST;
}

static void cpu() {
    page_lock();
    cpu_copies();
    cpu_round_trip(4, 3000);
    cpu_round_trip(ACTIVATION, 600);
    cpu_pipeline();
    compare("cpu_cost", 11, 4, enqueued_ahead);
    if (rank_ == 0) CHECK(cuMemHostUnregister(host_slots));
}

struct Part {
    const char* name;
    void (*measure)();
    bool shares_a_gpu;  // whether it is run on one GPU, too, without being asked for
};
// The first one comes before rank 1 opens its GPU.
static const Part PARTS[] = {{"cpu", cpu, true},          {"check", check_order, true},      {"pipeline", pipeline, false},
                             {"one_way", one_way, false}, {"round_trip", round_trip, true}, {"issue", issue, false},
                             {"cost", cost, false},       {"chain", chain, false}};

// --- the first process ----------------------------------------------------------------------------------------------

[[noreturn]] static void run(int rank, int socket, const std::vector<std::string>& asked) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    rank_ = rank;
    if (rank_ == 0) open_gpu();
    std::string left_out;
    for (const Part& one : PARTS) {
        if (&one == PARTS + 1) {
            if (rank_ == 1) open_gpu();
            connect(socket);
        }
        const bool is_asked = std::find(asked.begin(), asked.end(), one.name) != asked.end();
        if (!asked.empty() && !is_asked) continue;
        if (!is_asked && gpus == 1 && !one.shares_a_gpu) {
            left_out += (left_out.empty() ? "" : " ") + std::string(one.name);
            continue;
        }
        part = one.name;
        const double start = now_us();
        one.measure();
        meet();
        print("part_done", text("\"part\":\"%s\",\"seconds\":%.1f", one.name, (now_us() - start) / 1e6));
    }
    if (!left_out.empty()) print("left_out", text("\"parts\":\"%s\",\"needs_gpus\":2", left_out.c_str()));
    part = "end";
    CHECK(cudaDeviceSynchronize());
    meet();
    std::fflush(stdout);
    _exit(0);
}

int main(int count, char** words) {
    const std::vector<std::string> asked(words + 1, words + count);
    for (const std::string& word : asked) {
        const auto named = [&](const Part& one) { return word == one.name; };
        if (std::any_of(std::begin(PARTS), std::end(PARTS), named)) continue;
        std::fprintf(stderr, "copy_engine: no part %s; the first lines of the source say which there are\n", word.c_str());
        return 2;
    }
    shared = static_cast<Shared*>(shared_memory(sizeof(Shared)));
    for (char** memory : {&host_slots, &untouched}) *memory = static_cast<char*>(shared_memory(HOST_BYTES));
    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    const timeval limit{30, 0};
    for (const int socket : sockets) CHECK(setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);

    pid_t ranks[2];
    for (int rank = 0; rank < 2; rank++) {
        ranks[rank] = fork();
        CHECK(ranks[rank] >= 0);
        if (ranks[rank] == 0) run(rank, sockets[rank], asked);
    }
    int left = 2, result = 0;
    double deadline = now_us() + LIMIT_S * 1e6;
    for (bool late = false; left > 0; usleep(1000)) {
        for (int rank = 0; rank < 2; rank++) {
            int status;
            if (ranks[rank] == 0 || waitpid(ranks[rank], &status, WNOHANG) != ranks[rank]) continue;
            ranks[rank] = 0, left--;
            shared->gone[rank].value = 1;
            if (status != 0) {
                // The other one sees it at its next wait, unless it waits inside of the driver.
                result = 1, deadline = std::min(deadline, now_us() + 5e6);
                if (!late) std::fprintf(stderr, "copy_engine: rank %d ended with status %#x\n", rank, status);
            }
        }
        if (left == 0 || now_us() < deadline) continue;
        if (late) break;  // a process that SIGKILL does not end is the driver's
        std::fprintf(stderr, "copy_engine: ending what is late\n");
        late = true, result = 1, deadline = now_us() + 5e6;
        for (const pid_t rank : ranks) {
            if (rank > 0) kill(rank, SIGKILL);
        }
    }
    return result;
}
