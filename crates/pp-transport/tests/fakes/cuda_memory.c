/* Memory. Device addresses are reserved address space with no access: a host that touches them dies. The
 * bytes live in a shadow only streams can reach. Addresses are never used twice, so a use after free is
 * always seen. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEVICE_SPAN (1ull << 38)
/* Less than the span, so that all devices fit behind a base that is rounded up. */
#define DEVICE_USED (DEVICE_SPAN - (1ull << 20))
#define PAGE 4096ull

struct allocation {
    address at;
    uint64_t bytes, mapped;
    uint8_t *shadow; /* device: elsewhere; host: at itself */
    int device;      /* -1: page-locked host memory */
    int pins;
    bool freed, registered;
};

static struct allocation **all; /* in the order of allocation, looked through from the newest */
static unsigned count, room;
static address base;
static uint64_t bumped[MAX_DEVICES], used[MAX_DEVICES];

static struct allocation *find(address at) {
    for (unsigned i = count; i-- > 0;)
        if (at >= all[i]->at && at < all[i]->at + (all[i]->bytes ? all[i]->bytes : 1)) return all[i];
    return NULL;
}

static struct allocation *add(struct allocation value) {
    if (count == room) all = realloc(all, (room = room ? 2 * room : 64) * sizeof *all);
    struct allocation *new = malloc(sizeof *new);
    *new = value;
    return all[count++] = new;
}

static uint8_t *map(uint64_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static int allocate(int device, uint64_t bytes, address *at) {
    if (bytes == 0) return INVALID_VALUE;
    if (!base) {
        void *span = mmap(NULL, DEVICE_SPAN * MAX_DEVICES, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (span == MAP_FAILED) return OUT_OF_MEMORY;
        base = ((address)span + (1u << 20)) & ~((1ull << 20) - 1);
    }
    uint64_t mapped = (bytes + PAGE - 1) & ~(PAGE - 1);
    if (used[device] + mapped > fake_setting_number("MEMORY", 1u << 30)) return OUT_OF_MEMORY;
    uint8_t *shadow = map(mapped);
    if (!shadow) return OUT_OF_MEMORY;
    *at = base + (uint64_t)device * DEVICE_USED + bumped[device];
    bumped[device] += mapped + PAGE; /* a page between neighbours: overruns miss */
    used[device] += mapped;
    add((struct allocation){.at = *at, .bytes = bytes, .mapped = mapped, .shadow = shadow, .device = device});
    return OK;
}

static void give_back(struct allocation *a) {
    /* The address of page-locked memory stays taken, with no access: it must not come back as that of
     * something else. */
    if (!a->registered && a->device < 0)
        mmap(a->shadow, a->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    else if (!a->registered) munmap(a->shadow, a->mapped);
    a->shadow = NULL;
}

static void release(struct allocation *a) {
    a->freed = true;
    if (a->device >= 0) used[a->device] -= a->mapped;
    if (a->pins) ppfake_record("Fault what=freed_in_use addr=%#llx", (unsigned long long)a->at);
    else give_back(a);
}

bool ppfake_is_device(address at) { return base && at >= base && at < base + DEVICE_USED * MAX_DEVICES; }

uint8_t *ppfake_pin(int device, address at, uint64_t bytes, const char *who) {
    ppfake_lock();
    struct allocation *a = find(at);
    uint8_t *host = NULL;
    const char *wrong = NULL;
    if (!a && !ppfake_is_device(at)) host = (uint8_t *)(uintptr_t)at; /* pageable memory of the host */
    else if (!a) wrong = "unknown";
    else if (a->freed) wrong = "freed";
    else if (at + bytes > a->at + a->bytes) wrong = "beyond_end";
    else if (a->device >= 0 && a->device != device) wrong = "foreign";
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
    struct allocation *a = find(at);
    if (a && a->pins && --a->pins == 0 && a->freed) give_back(a);
    ppfake_unlock();
}

void ppfake_free_under(address at) {
    ppfake_lock();
    struct allocation *a = find(at);
    if (a && !a->freed) {
        ppfake_record("cuMemFree addr=%#llx len=%llu dev=%d", (unsigned long long)a->at,
                      (unsigned long long)a->bytes, a->device);
        release(a);
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
    struct allocation *a = find(at);
    /* The real call waits for the device; this one does not, so that code that counts on it is found out. */
    if (!code && (!a || a->at != at || a->freed || a->device < 0)) {
        ppfake_record("Fault what=bad_free addr=%#llx", (unsigned long long)at);
        code = INVALID_VALUE;
    } else if (!code) {
        ppfake_record("cuMemFree addr=%#llx len=%llu dev=%d", (unsigned long long)at,
                      (unsigned long long)a->bytes, a->device);
        release(a);
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
    release(argument);
    ppfake_unlock();
}

EXPORT int cuMemFreeAsync(address at, void *stream) {
    FAULT_POINT("cuMemFreeAsync");
    if (!at) return OK;
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct stream *s = code ? NULL : fake_stream(c, stream);
    struct allocation *a = find(at);
    if (!code && !s) code = INVALID_HANDLE;
    if (!code && (!a || a->at != at || a->freed || a->device < 0)) {
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

EXPORT int cuMemHostAlloc(void **host, size_t bytes, unsigned flags) {
    FAULT_POINT("cuMemHostAlloc");
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    if (!code && bytes == 0) code = INVALID_VALUE;
    if (!code) {
        uint64_t mapped = (bytes + PAGE - 1) & ~(PAGE - 1);
        uint8_t *p = map(mapped);
        if (!p) code = OUT_OF_MEMORY;
        else {
            add((struct allocation){
                .at = (address)(uintptr_t)p, .bytes = bytes, .mapped = mapped, .shadow = p, .device = -1});
            ppfake_record("cuMemHostAlloc addr=%#llx len=%zu flags=%u", (unsigned long long)(uintptr_t)p,
                          bytes, flags);
            *host = p;
        }
    }
    ppfake_unlock();
    return code;
}
EXPORT int cuMemAllocHost_v2(void **host, size_t bytes) { return cuMemHostAlloc(host, bytes, 0); }

static int end_host(void *host, bool registered, const char *name) {
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct allocation *a = find((address)(uintptr_t)host);
    if (!code && (!a || a->freed || a->shadow != host || a->device >= 0 || a->registered != registered))
        code = INVALID_VALUE;
    if (!code) {
        ppfake_record("%s addr=%#llx len=%llu", name, (unsigned long long)a->at,
                      (unsigned long long)a->bytes);
        release(a);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuMemFreeHost(void *host) {
    FAULT_POINT("cuMemFreeHost");
    return end_host(host, false, "cuMemFreeHost");
}

EXPORT int cuMemHostRegister_v2(void *host, size_t bytes, unsigned flags) {
    FAULT_POINT("cuMemHostRegister");
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    if (!code) {
        add((struct allocation){.at = (address)(uintptr_t)host,
                                .bytes = bytes,
                                .shadow = host,
                                .device = -1,
                                .registered = true});
        ppfake_record("cuMemHostRegister addr=%#llx len=%zu flags=%u", (unsigned long long)(uintptr_t)host,
                      bytes, flags);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuMemHostUnregister(void *host) { return end_host(host, true, "cuMemHostUnregister"); }

EXPORT int cuMemHostGetDevicePointer_v2(address *at, void *host, unsigned flags) {
    (void)flags;
    ppfake_lock();
    struct allocation *a = find((address)(uintptr_t)host);
    ppfake_unlock();
    *at = (address)(uintptr_t)host;
    return a && a->device < 0 ? OK : INVALID_VALUE;
}
