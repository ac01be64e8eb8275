/* Memory. Device addresses are reserved address space with no access: a host that touches them dies. The
 * bytes live in a shadow only streams can reach. Addresses are never used twice, so a use after free is
 * always seen. */
#define _GNU_SOURCE
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEVICE_SPAN (1ull << 38)
/* Less than the span, so that all places fit behind a base that is rounded up. */
#define ROUND (2ull << 20)
#define DEVICE_USED (DEVICE_SPAN - ROUND)
#define PLACES (MAX_DEVICES + 1)
#define PAGE 4096ull

static struct allocation **all; /* in the order of allocation, looked through from the newest */
static unsigned count, room;
static address base;
static uint64_t bumped[PLACES], used[MAX_DEVICES];

struct allocation *fake_find(address at) {
    for (unsigned i = count; i-- > 0;)
        if (at >= all[i]->at && at < all[i]->at + (all[i]->bytes ? all[i]->bytes : 1)) return all[i];
    return NULL;
}

struct allocation *fake_add(struct allocation value) {
    if (count == room) all = realloc(all, (room = room ? 2 * room : 64) * sizeof *all);
    struct allocation *new = malloc(sizeof *new);
    *new = value;
    return all[count++] = new;
}

static uint8_t *map(uint64_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

address fake_addresses(int place, uint64_t bytes, uint64_t alignment) {
    if (!base) {
        void *span =
            mmap(NULL, DEVICE_SPAN * PLACES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (span == MAP_FAILED) return 0;
        base = ((address)span + ROUND) & ~(ROUND - 1);
    }
    address start = base + (uint64_t)place * DEVICE_USED;
    address at = (start + bumped[place] + alignment - 1) & ~(alignment - 1);
    uint64_t end = at + bytes + PAGE - start; /* a page between neighbours: overruns miss */
    if (end > DEVICE_USED) return 0;
    bumped[place] = end;
    return at;
}

int fake_take(int device, uint64_t bytes) {
    if (used[device] + bytes > fake_setting_number("MEMORY", 1u << 30)) return OUT_OF_MEMORY;
    used[device] += bytes;
    return OK;
}
void fake_give(int device, uint64_t bytes) { used[device] -= bytes; }

static int allocate(int device, uint64_t bytes, address *at) {
    if (bytes == 0) return INVALID_VALUE;
    uint64_t mapped = (bytes + PAGE - 1) & ~(PAGE - 1);
    if (fake_take(device, mapped)) return OUT_OF_MEMORY;
    uint8_t *shadow = map(mapped);
    *at = fake_addresses(device, mapped, PAGE);
    if (!shadow || !*at) {
        fake_give(device, mapped);
        return OUT_OF_MEMORY;
    }
    fake_add((struct allocation){
        .at = *at, .bytes = bytes, .mapped = mapped, .shadow = shadow, .kind = OF_DEVICE, .device = device});
    return OK;
}

static void give_back(struct allocation *a) {
    switch (a->kind) {
    case OF_DEVICE: munmap(a->shadow, a->mapped); break;
    case MAPPED: fake_unmapped(a->physical); break;
    case PAGE_LOCKED:
        /* The address stays taken, with no access: it must not come back as that of something else. */
        mmap(a->shadow, a->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        break;
    case REGISTERED:
        fake_watch_no_more(a);
        if (a->mapped) munmap((void *)((uintptr_t)a->shadow & ~(PAGE - 1)), a->mapped);
    }
    a->shadow = NULL;
}

void fake_release(struct allocation *a) {
    a->freed = true;
    if (a->kind == OF_DEVICE) fake_give(a->device, a->mapped);
    if (a->pins) ppfake_record("Fault what=freed_in_use addr=%#llx", (unsigned long long)a->at);
    else give_back(a);
}

bool ppfake_is_device(address at) { return base && at >= base && at < base + DEVICE_USED * PLACES; }

uint8_t *ppfake_pin(int device, address at, uint64_t bytes, const char *who) {
    ppfake_lock();
    struct allocation *a = fake_find(at);
    uint8_t *host = NULL;
    const char *wrong = NULL;
    if (!a && !ppfake_is_device(at)) host = (uint8_t *)(uintptr_t)at; /* pageable memory of the host */
    else if (!a) wrong = "unknown";
    else if (a->freed) wrong = "freed";
    else if (at + bytes > a->at + a->bytes) wrong = "beyond_end";
    else if (a->kind == OF_DEVICE && a->device != device) wrong = "foreign";
    else if (a->kind == MAPPED && !(a->access >> device & 1)) wrong = "no_access";
    else {
        a->pins++;
        host = a->shadow + (at - a->at);
    }
    if (wrong) {
        ppfake_record("Fault what=%s who=%s addr=%#llx len=%llu", wrong, who, (unsigned long long)at,
                      (unsigned long long)bytes);
        fake_poison(device, ILLEGAL_ADDRESS);
    }
    ppfake_unlock();
    return host;
}

void ppfake_unpin(address at) {
    ppfake_lock();
    struct allocation *a = fake_find(at);
    if (a && a->pins && --a->pins == 0 && a->freed) give_back(a);
    ppfake_unlock();
}

void ppfake_free_under(address at) {
    ppfake_lock();
    struct allocation *a = fake_find(at);
    if (a && !a->freed) {
        ppfake_record("cuMemFree addr=%#llx len=%llu dev=%d", (unsigned long long)a->at,
                      (unsigned long long)a->bytes, a->device);
        fake_release(a);
    }
    ppfake_unlock();
}

EXPORT int cuMemAlloc_v2(address *at, size_t bytes) {
    FAULT_POINT("cuMemAlloc");
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    if (!code) code = allocate(c->device, bytes, at);
    if (!code)
        ppfake_record("cuMemAlloc addr=%#llx len=%zu dev=%d", (unsigned long long)*at, bytes, c->device);
    ppfake_unlock();
    return code;
}

EXPORT int cuMemFree_v2(address at) {
    FAULT_POINT("cuMemFree");
    if (!at) return OK;
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct allocation *a = fake_find(at);
    /* The real call waits for the device; this one does not, so that code that counts on it is found out. */
    if (!code && (!a || a->at != at || a->freed || a->kind != OF_DEVICE)) {
        ppfake_record("Fault what=bad_free addr=%#llx", (unsigned long long)at);
        code = INVALID_VALUE;
    } else if (!code) {
        ppfake_record("cuMemFree addr=%#llx len=%llu dev=%d", (unsigned long long)at,
                      (unsigned long long)a->bytes, a->device);
        fake_release(a);
    }
    ppfake_unlock();
    return code;
}

/* In the order of a stream: what is allocated is there from then on, and what is freed is gone when the
 * stream comes to it. */
EXPORT int cuMemAllocAsync(address *at, size_t bytes, void *stream) {
    FAULT_POINT("cuMemAllocAsync");
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct stream *s = code ? NULL : fake_stream(c, stream);
    if (!code && !s) code = INVALID_HANDLE;
    if (!code) code = allocate(c->device, bytes, at);
    if (!code)
        ppfake_record("cuMemAllocAsync addr=%#llx len=%zu dev=%d st=%d", (unsigned long long)*at, bytes,
                      c->device, s->id);
    ppfake_unlock();
    return code;
}

static void release_in_order(struct stream *s, void *argument) {
    (void)s;
    ppfake_lock();
    fake_release(argument);
    ppfake_unlock();
}

EXPORT int cuMemFreeAsync(address at, void *stream) {
    FAULT_POINT("cuMemFreeAsync");
    if (!at) return OK;
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct stream *s = code ? NULL : fake_stream(c, stream);
    struct allocation *a = fake_find(at);
    if (!code && !s) code = INVALID_HANDLE;
    if (!code && (!a || a->at != at || a->freed || a->kind != OF_DEVICE)) {
        ppfake_record("Fault what=bad_free addr=%#llx", (unsigned long long)at);
        code = INVALID_VALUE;
    }
    if (!code) {
        ppfake_record("cuMemFreeAsync addr=%#llx len=%llu dev=%d st=%d", (unsigned long long)at,
                      (unsigned long long)a->bytes, a->device, s->id);
        ppfake_enqueue(s, release_in_order, a);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuMemGetInfo_v2(size_t *free, size_t *total) {
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    if (!code) {
        *total = fake_setting_number("MEMORY", 1u << 30);
        *free = *total - used[c->device];
    }
    ppfake_unlock();
    return code;
}
