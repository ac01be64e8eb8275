/* Host memory that a device may touch: page-locked by the driver, or registered after some other allocation. */
#define _GNU_SOURCE
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096ull

EXPORT int cuMemHostAlloc(void **host, size_t bytes, unsigned flags) {
    FAULT_POINT("cuMemHostAlloc");
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    if (!code && bytes == 0) code = INVALID_VALUE;
    if (!code) {
        uint64_t mapped = (bytes + PAGE - 1) & ~(PAGE - 1);
        uint8_t *p =
            mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) code = OUT_OF_MEMORY;
        else {
            fake_add((struct allocation){.at = (address)(uintptr_t)p,
                                         .bytes = bytes,
                                         .mapped = mapped,
                                         .shadow = p,
                                         .kind = PAGE_LOCKED});
            ppfake_record("cuMemHostAlloc addr=%#llx len=%zu flags=%u", (unsigned long long)(uintptr_t)p,
                          bytes, flags);
            *host = p;
        }
    }
    ppfake_unlock();
    return code;
}
EXPORT int cuMemAllocHost_v2(void **host, size_t bytes) { return cuMemHostAlloc(host, bytes, 0); }

static struct allocation *live(void *host) {
    struct allocation *a = fake_find((address)(uintptr_t)host);
    return a && !a->freed && (a->kind == PAGE_LOCKED || a->kind == REGISTERED) ? a : NULL;
}

static int end_host(void *host, enum memory_kind kind, const char *name) {
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct allocation *a = live(host);
    if (!code && (!a || a->at != (address)(uintptr_t)host || a->kind != kind))
        code = kind == REGISTERED ? NOT_REGISTERED : INVALID_VALUE;
    if (!code) {
        ppfake_record("%s addr=%#llx len=%llu", name, (unsigned long long)a->at,
                      (unsigned long long)a->bytes);
        fake_release(a);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuMemFreeHost(void *host) {
    FAULT_POINT("cuMemFreeHost");
    return end_host(host, PAGE_LOCKED, "cuMemFreeHost");
}

bool fake_next_mapping(FILE *maps, struct mapping *m) {
    char line[512], rights[5];
    unsigned major, minor;
    while (maps && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%llx-%llx %4s %llx %x:%x %llu", &m->from, &m->to, rights, &m->offset, &major, &minor,
                   &m->inode) != 7)
            continue;
        m->shared = rights[3] == 's';
        m->device = major << 8 | minor;
        return true;
    }
    return false;
}

/* What lies behind [host, host+bytes): whether all of it is mapped, and which file shares it with other
 * processes. */
struct backing {
    bool mapped, shared;
    unsigned long long device, inode, offset;
};
static struct backing backing_of(uintptr_t host, uint64_t bytes) {
    struct backing found = {0};
    uintptr_t reached = host;
    struct mapping m;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (reached < host + bytes && fake_next_mapping(maps, &m)) {
        if (reached < m.from || reached >= m.to) continue;
        if (reached == host)
            found = (struct backing){false, m.shared, m.device, m.inode, m.offset + (host - m.from)};
        else if (found.inode != m.inode) found.shared = false;
        reached = m.to;
    }
    if (maps) fclose(maps);
    found.mapped = reached >= host + bytes;
    return found;
}

EXPORT int cuMemHostRegister_v2(void *host, size_t bytes, unsigned flags) {
    FAULT_POINT("cuMemHostRegister");
    struct context *c;
    uintptr_t from = (uintptr_t)host, page = from & ~(PAGE - 1);
    ppfake_lock();
    int code = fake_current(&c);
    if (!code && (!bytes || flags & ~15u)) code = INVALID_VALUE;
    if (!code && (live(host) || live((char *)host + bytes - 1))) code = ALREADY_REGISTERED;
    struct backing backing = code ? (struct backing){0} : backing_of(from, bytes);
    if (!code && !backing.mapped) code = INVALID_VALUE;
    if (!code) {
        /* The device keeps registered pages when the host unmaps them: another mapping of them does that. */
        uint64_t mapped = backing.shared ? (from + bytes - page + PAGE - 1) & ~(PAGE - 1) : 0;
        uint8_t *shadow = host;
        if (mapped) {
            void *alias = mremap((void *)page, 0, mapped, MREMAP_MAYMOVE);
            if (alias == MAP_FAILED) abort();
            shadow = (uint8_t *)alias + (from - page);
        }
        struct allocation *a = fake_add((struct allocation){
            .at = from, .bytes = bytes, .mapped = mapped, .shadow = shadow, .kind = REGISTERED});
        if (mapped) fake_watch(a);
        char file[96] = "";
        if (mapped)
            snprintf(file, sizeof file, " file=%llx.%llu from=%llu", backing.device, backing.inode,
                     backing.offset);
        ppfake_record("cuMemHostRegister addr=%#llx len=%zu flags=%u%s", (unsigned long long)from, bytes,
                      flags, file);
    }
    ppfake_unlock();
    return code;
}

bool fake_is_shared(const struct allocation *a) {
    return a && !a->freed && a->kind == REGISTERED && a->mapped;
}

EXPORT int cuMemHostUnregister(void *host) {
    FAULT_POINT("cuMemHostUnregister");
    ppfake_lock();
    struct allocation *a = live(host);
    if (fake_is_shared(a) && backing_of(a->at, 1).inode != backing_of((uintptr_t)a->shadow, 1).inode)
        ppfake_record("Fault what=unmapped_before addr=%#llx", (unsigned long long)a->at);
    ppfake_unlock();
    return end_host(host, REGISTERED, "cuMemHostUnregister");
}

EXPORT int cuMemHostGetDevicePointer_v2(address *at, void *host, unsigned flags) {
    FAULT_POINT("cuMemHostGetDevicePointer");
    ppfake_lock();
    int code = flags || !live(host) ? INVALID_VALUE : OK;
    ppfake_unlock();
    if (!code) *at = (address)(uintptr_t)host;
    return code;
}
