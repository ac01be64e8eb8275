/* The bytes between ranks: a file mapped by all of them. Nothing here takes a lock that a killed process
 * could keep. */
#define _GNU_SOURCE
#include "nccl.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

struct pipe {
    _Alignas(64) uint64_t written;
    _Alignas(64) uint64_t read;
    _Alignas(64) uint32_t connected; /* bit 0 sender, bit 1 receiver */
};
struct shared {
    uint32_t joined;
    uint32_t bell[MAX_RANKS];
    uint8_t uuid[MAX_RANKS][16];
    struct utsname host[MAX_RANKS];
    struct pipe pipe[MAX_RANKS][MAX_RANKS];
};
struct wire {
    struct shared *shared;
    uint8_t *rings;
    uint64_t eager, room, size;
    int ranks;
    char path[256];
};
struct header {
    uint64_t bytes;
    uint32_t type, magic;
};
#define HEADER_MAGIC 0x4e43434cu

static struct timespec moment(long ns) { return (struct timespec){0, ns}; }

uint32_t wire_bell(struct wire *w, int rank) {
    return __atomic_load_n(&w->shared->bell[rank], __ATOMIC_ACQUIRE);
}
/* At most a millisecond: a ring may come from a process that died before it could wake anybody. */
void wire_wait(struct wire *w, int rank, uint32_t seen) {
    struct timespec t = moment(1000000);
    syscall(SYS_futex, &w->shared->bell[rank], FUTEX_WAIT, seen, &t, NULL, 0);
}
void wire_ring(struct wire *w, int rank) {
    __atomic_add_fetch(&w->shared->bell[rank], 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &w->shared->bell[rank], FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

struct wire *wire_open(const struct unique_id *id, int ranks) {
    struct wire *w = calloc(1, sizeof *w);
    const char *directory = ppfake_setting("NCCL_DIR");
    if (!directory || !*directory) directory = getenv("TMPDIR");
    snprintf(w->path, sizeof w->path, "%s/%.40s", directory ? directory : "/tmp", id->bytes);
    w->ranks = ranks;
    w->eager = ppfake_setting_number("NCCL_EAGER", 1 << 20);
    w->room = ((w->eager < 65536 ? 65536 : w->eager) + 8191) & ~4095ull;
    uint64_t head = (sizeof(struct shared) + 4095) & ~4095ull;
    w->size = head + w->room * (uint64_t)(ranks * ranks);
    /* Every rank makes the file the same size, and zeros are its first state: which rank comes first need not
     * be known. */
    int file = open(w->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    void *p = file >= 0 && ftruncate(file, (off_t)w->size) == 0
                  ? mmap(NULL, w->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                  : MAP_FAILED;
    if (file >= 0) close(file);
    if (p == MAP_FAILED) {
        comm_error("%s: %s", w->path, strerror(errno));
        free(w);
        return NULL;
    }
    w->shared = p;
    w->rings = (uint8_t *)p + head;
    return w;
}

void wire_close(struct wire *w) {
    if (!w) return;
    unlink(w->path);
    munmap(w->shared, w->size);
    free(w);
}

int wire_join(struct wire *w, int rank, const uint8_t uuid[16], const volatile bool *stop) {
    memcpy(w->shared->uuid[rank], uuid, 16);
    uname(&w->shared->host[rank]);
    uint32_t bit = 1u << rank;
    if (__atomic_fetch_or(&w->shared->joined, bit, __ATOMIC_ACQ_REL) & bit) {
        comm_error("rank %d has joined already", rank);
        return NCCL_USAGE;
    }
    for (int r = 0; r < w->ranks; r++) wire_ring(w, r);
    for (;;) {
        uint32_t seen = wire_bell(w, rank);
        if (__atomic_load_n(&w->shared->joined, __ATOMIC_ACQUIRE) == (1u << w->ranks) - 1) break;
        if (*stop) return NCCL_INTERNAL;
        wire_wait(w, rank, seen);
    }
    for (int r = 0; r < w->ranks; r++)
        if (r != rank && memcmp(w->shared->uuid[r], uuid, 16) == 0 &&
            strcmp(w->shared->host[r].nodename, w->shared->host[rank].nodename) == 0) {
            comm_error("Duplicate GPU detected : rank %d and rank %d both on one CUDA device", rank, r);
            return NCCL_USAGE;
        }
    unlink(w->path); /* all have it open */
    return NCCL_OK;
}

bool wire_connect(struct wire *w, int from, int to, bool sending, const volatile bool *stop) {
    struct pipe *p = &w->shared->pipe[from][to];
    int self = sending ? from : to;
    uint32_t mine = sending ? 1 : 2;
    if (!(__atomic_fetch_or(&p->connected, mine, __ATOMIC_ACQ_REL) & mine)) wire_ring(w, sending ? to : from);
    for (;;) {
        uint32_t seen = wire_bell(w, self);
        if (__atomic_load_n(&p->connected, __ATOMIC_ACQUIRE) == 3) return true;
        if (*stop) return false;
        wire_wait(w, self, seen);
    }
}

/* Moves up to `bytes` at position `at` of a ring. */
static void ring_copy(struct wire *w, uint8_t *ring, uint64_t at, uint8_t *memory, uint64_t bytes, bool in) {
    while (bytes) {
        uint64_t offset = at % w->room, step = w->room - offset < bytes ? w->room - offset : bytes;
        if (memory) {
            if (in) memcpy(ring + offset, memory, step);
            else memcpy(memory, ring + offset, step);
            memory += step;
        }
        at += step;
        bytes -= step;
    }
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static bool move_out(struct wire *w, struct transfer *t, struct pipe *p, uint8_t *ring) {
    uint64_t written = p->written, read = __atomic_load_n(&p->read, __ATOMIC_ACQUIRE),
             space = w->room - (written - read);
    if (t->phase == AT_HEADER) {
        struct header h = {t->bytes, (uint32_t)t->type, HEADER_MAGIC};
        if (space < sizeof h) return false;
        ring_copy(w, ring, written, (uint8_t *)&h, sizeof h, true);
        written += sizeof h, space -= sizeof h;
        t->end = written + t->bytes;
        t->phase = AT_BODY;
    }
    if (t->phase == AT_BODY) {
        uint64_t step = least(space, t->bytes - t->moved);
        ring_copy(w, ring, written, t->host + t->moved, step, true);
        written += step;
        t->moved += step;
        if (t->moved == t->bytes) t->phase = AT_END;
    }
    bool moved = written != p->written;
    __atomic_store_n(&p->written, written, __ATOMIC_RELEASE);
    /* Up to the eager limit the sender is done; beyond it the receiver must have taken everything. */
    if (t->phase == AT_END && (t->bytes <= w->eager || read >= t->end)) t->phase = DONE, moved = true;
    return moved;
}

static bool move_in(struct wire *w, struct transfer *t, struct pipe *p, uint8_t *ring) {
    uint64_t read = p->read, there = __atomic_load_n(&p->written, __ATOMIC_ACQUIRE) - read;
    bool moved = false;
    if (t->phase == AT_HEADER) {
        struct header h;
        if (there < sizeof h) return false;
        ring_copy(w, ring, read, (uint8_t *)&h, sizeof h, false);
        read += sizeof h, there -= sizeof h;
        t->announced = h.bytes;
        t->phase = AT_BODY;
        if (h.bytes != t->bytes || h.type != (uint32_t)t->type)
            ppfake_record("Fault what=size_mismatch op=%d sent=%llu received=%llu", t->id,
                          (unsigned long long)h.bytes, (unsigned long long)t->bytes);
    }
    if (t->phase == AT_BODY) {
        /* A receive that is too small loses the rest without a word, as the real one does; one that is too
         * large never ends. */
        uint64_t step = least(there, t->announced - t->moved),
                 wanted = t->moved < t->bytes ? least(step, t->bytes - t->moved) : 0;
        ring_copy(w, ring, read, wanted ? t->host + t->moved : NULL, wanted ? wanted : step, false);
        read += wanted ? wanted : step;
        t->moved += wanted ? wanted : step;
        if (t->moved == t->announced) t->phase = t->announced < t->bytes ? AT_HANG : DONE;
    }
    moved = read != p->read || t->phase == DONE;
    __atomic_store_n(&p->read, read, __ATOMIC_RELEASE);
    return moved;
}

bool wire_move(struct wire *w, struct transfer *t) {
    if (t->phase >= AT_HANG) return false;
    int from = t->sending ? t->self : t->peer, to = t->sending ? t->peer : t->self;
    struct pipe *p = &w->shared->pipe[from][to];
    uint8_t *ring = w->rings + w->room * (uint64_t)(from * w->ranks + to);
    bool moved = t->sending ? move_out(w, t, p, ring) : move_in(w, t, p, ring);
    if (moved) wire_ring(w, t->peer);
    return moved;
}
