/* The limit on this machine: the same two-stage pipeline, written by hand with nothing but shared memory.
 *
 *   shm_pilot hop
 *   shm_pilot overlap BYTES DECODE_MS PHASE_B_MS CHUNKS DEPTH
 *   shm_pilot touch   BYTES 0 0 CHUNKS DEPTH
 *
 * Two processes, one ring of DEPTH slots in each direction. A send hands over a slot: zero copy. A waiting side spins for
 * a moment and then sleeps on a futex. A stage sleeps until shortly before its mark and then spins to it. With touch the
 * producer writes the slot, with non-temporal stores where there is AVX2, and the consumer reads every byte. Prints one JSON object with the
 * keys of `pp bench overlap --json`. Build: cc -O3 -march=native shm_pilot.c */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { SPINS = 2000, WARM_UP = 16, MAX_DEPTH = 64, LINE = 64 };

/* A counter that one side raises and the other waits for. */
struct counter {
    _Alignas(LINE) _Atomic uint32_t value;
    _Alignas(LINE) _Atomic uint32_t sleeper;
};
struct ring {
    struct counter sent, freed;
};
struct shared {
    struct ring ring[2]; /* [0] forward, [1] back */
    double phase_b_ms;   /* median, measured by rank 1 */
    double idle_ms;      /* median wait of rank 1 for a chunk */
    _Alignas(LINE) _Atomic uint32_t ball[2 * LINE];
};

static struct shared *shared;
static uint8_t *slots[2];
static size_t bytes, stride;
static int depth, touch;
static volatile uint64_t sink;

/* Tells the processor that this is a loop that waits. */
static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set); /* Without two cores it runs unpinned. */
}

static void raise_to(struct counter *c, uint32_t value) {
    atomic_store(&c->value, value);
    if (atomic_exchange(&c->sleeper, 0))
        syscall(SYS_futex, &c->value, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Waits until the counter has passed `past`. */
static void wait_past(struct counter *c, uint32_t past) {
    for (int i = 0; i < SPINS; i++) {
        if ((int32_t)(atomic_load_explicit(&c->value, memory_order_acquire) - past) > 0) return;
        relax();
    }
    uint32_t seen;
    while ((int32_t)((seen = atomic_load(&c->value)) - past) <= 0) {
        atomic_store(&c->sleeper, 1);
        if (atomic_load(&c->value) == seen) syscall(SYS_futex, &c->value, FUTEX_WAIT, seen, NULL, NULL, 0);
    }
}

static void stage(double ms) {
    double mark = now_ms() + ms;
    double early = ms - 0.15;
    if (early > 0) {
        struct timespec t = {(time_t)(early / 1e3), (long)(early * 1e6) % 1000000000L};
        nanosleep(&t, NULL);
    }
    while (ms > 0 && now_ms() < mark) relax();
}

static void fill(uint8_t *slot, uint64_t seed) {
    const uint64_t step = 0x0101010101010101;
#ifdef __AVX2__
    __m256i v = _mm256_set1_epi64x((long long)seed), steps = _mm256_set1_epi64x((long long)step);
    for (size_t i = 0; i + 32 <= bytes; i += 32) {
        _mm256_stream_si256((__m256i *)(slot + i), v);
        v = _mm256_add_epi64(v, steps);
    }
    _mm_sfence();
#else
    for (size_t i = 0; i + 8 <= bytes; i += 8) *(uint64_t *)(slot + i) = seed + i / 32 * step;
#endif
}

static uint64_t read_all(const uint8_t *slot) {
    uint64_t sum = 0;
    for (size_t i = 0; i + 8 <= bytes; i += 8) sum += *(const uint64_t *)(slot + i);
    return sum;
}

static void send_chunk(int way, uint32_t k) {
    struct ring *r = &shared->ring[way];
    if (k >= (uint32_t)depth) wait_past(&r->freed, k - depth);
    if (touch) fill(slots[way] + (k % depth) * stride, k);
    raise_to(&r->sent, k + 1);
}

static void receive_chunk(int way, uint32_t k) {
    wait_past(&shared->ring[way].sent, k);
    if (touch) sink += read_all(slots[way] + (k % depth) * stride);
}

static void free_chunk(int way, uint32_t k) { raise_to(&shared->ring[way].freed, k + 1); }

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n) {
    qsort(v, n, sizeof *v, by_value);
    return n ? (v[(n - 1) / 2] + v[n / 2]) / 2 : 0;
}

static void rank_1(double ms, uint32_t chunks) {
    double *busy = calloc(chunks, sizeof *busy), *idle = calloc(chunks, sizeof *idle);
    for (uint32_t k = 0; k < chunks; k++) {
        double asked = now_ms();
        wait_past(&shared->ring[0].sent, k);
        double began = now_ms();
        receive_chunk(0, k);
        stage(ms);
        free_chunk(0, k);
        double ended = now_ms();
        send_chunk(1, k);
        if (k >= WARM_UP) busy[k - WARM_UP] = ended - began, idle[k - WARM_UP] = began - asked;
    }
    shared->phase_b_ms = median(busy, (int)(chunks - WARM_UP));
    shared->idle_ms = median(idle, (int)(chunks - WARM_UP));
}

static void rank_0(double ms, uint32_t chunks, double *periods, double *decode_ms) {
    double *busy = calloc(chunks, sizeof *busy), last = 0;
    uint32_t next = 0;
    for (uint32_t k = 0; k < chunks; k++) {
        while (next < chunks && next < k + depth) send_chunk(0, next++);
        wait_past(&shared->ring[1].sent, k);
        double began = now_ms();
        receive_chunk(1, k);
        stage(ms);
        free_chunk(1, k);
        double ended = now_ms();
        if (k >= WARM_UP) {
            periods[k - WARM_UP] = ended - last;
            busy[k - WARM_UP] = ended - began;
        }
        last = ended;
    }
    *decode_ms = median(busy, (int)(chunks - WARM_UP));
}

/* Half a round trip of one cache line between the two cores: says whether they share a cache. */
static int hop(void) {
    enum { TRIPS = 20000 };
    static double half[TRIPS];
    pid_t child = fork();
    if (!child) {
        pin(1);
        for (uint32_t i = 1; i <= TRIPS; i++) {
            while (atomic_load_explicit(&shared->ball[0], memory_order_acquire) != i) relax();
            atomic_store_explicit(&shared->ball[LINE], i, memory_order_release);
        }
        _exit(0);
    }
    pin(0);
    for (uint32_t i = 1; i <= TRIPS; i++) {
        double began = now_ms();
        atomic_store_explicit(&shared->ball[0], i, memory_order_release);
        while (atomic_load_explicit(&shared->ball[LINE], memory_order_acquire) != i) relax();
        half[i - 1] = (now_ms() - began) * 1e3 / 2;
    }
    waitpid(child, NULL, 0);
    printf("{\"hop_us\": %.3f}\n", median(half, TRIPS));
    return 0;
}

int main(int argc, char **argv) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (argc == 2 && !strcmp(argv[1], "hop")) return hop();
    if (argc != 7) {
        fprintf(stderr, "usage: shm_pilot hop | overlap|touch BYTES DECODE_MS PHASE_B_MS CHUNKS DEPTH\n");
        return 2;
    }
    touch = !strcmp(argv[1], "touch");
    bytes = strtoull(argv[2], NULL, 10);
    double decode = atof(argv[3]), phase_b = atof(argv[4]), decode_ms = 0;
    uint32_t chunks = (uint32_t)atol(argv[5]);
    depth = atoi(argv[6]);
    if (chunks <= WARM_UP || depth < 1 || depth > MAX_DEPTH) {
        fprintf(stderr, "more than %d chunks and a depth from 1 to %d, please\n", WARM_UP, MAX_DEPTH);
        return 2;
    }
    stride = (bytes + 4095) & ~(size_t)4095;
    for (int way = 0; way < 2; way++) {
        slots[way] = mmap(NULL, stride * depth + 4096, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (slots[way] == MAP_FAILED) return perror("mmap"), 1;
    }
    double *periods = calloc(chunks, sizeof *periods);
    prctl(PR_SET_TIMERSLACK, 1);
    pid_t child = fork();
    if (!child) {
        pin(1);
        rank_1(phase_b, chunks);
        _exit(0);
    }
    pin(0);
    rank_0(decode, chunks, periods, &decode_ms);
    waitpid(child, NULL, 0);

    double mean = 0;
    for (uint32_t k = 0; k < chunks - WARM_UP; k++) mean += periods[k] / (chunks - WARM_UP);
    double period = median(periods, (int)(chunks - WARM_UP));
    double slower = decode_ms > shared->phase_b_ms ? decode_ms : shared->phase_b_ms;
    printf("{\"transport\": \"shm_pilot\", \"bytes\": %zu, \"decode_ms\": %g, \"phase_b_ms\": %g, "
           "\"decode_ms_achieved\": %.5f, \"phase_b_ms_achieved\": %.5f, \"depth\": %d, \"chunks\": %u, "
           "\"period_ms\": %.5f, \"period_mean_ms\": %.5f, \"efficiency\": %.4f, \"efficiency_by_mean\": %.4f, "
           "\"phase_b_idle_ms\": %.5f}\n",
           bytes, decode, phase_b, decode_ms, shared->phase_b_ms, depth, chunks, period, mean, slower / period,
           slower / mean, shared->idle_ms);
    return 0;
}
