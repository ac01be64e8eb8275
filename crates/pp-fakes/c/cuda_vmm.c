/* Memory that is made, mapped and shared on its own. Its bytes lie in a memfd, so that another process can map
 * the same; behind them one page says whose they are. A mapping keeps them, also when the process that made
 * them is gone. */
#define _GNU_SOURCE
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096ull
#define SIGN 0x70702066616b6521ull
enum { BY_DEVICE = 1, BY_DESCRIPTOR = 1, PINNED = 1, READ_AND_WRITE = 3 };

/* The last page of the memfd. */
struct label {
    uint64_t sign, bytes;
    int maker, number; /* no two memories have both */
    int device;        /* among all of the host */
};

/* One memory of the process, however many handles and mappings it has. */
struct physical {
    struct label label;
    int file, device; /* -1: not a device of this process */
    uint8_t *shadow;
    unsigned handles, mappings;
    struct physical *next;
};
struct handle {
    struct physical *physical; /* NULL: released */
    bool imported, exportable;
};
struct reservation {
    address at;
    uint64_t bytes;
    bool freed;
};

static struct physical *memories;
static struct handle *handles;
static struct reservation *reservations;
static struct allocation **mappings;
static unsigned handle_count, reservation_count, mapping_count;
static int made;

/* Room for one more in an array that grows by ones: there are few. */
#define GROW(array, count) ((array) = realloc((array), ((count) + 1) * sizeof *(array)), &(array)[(count)++])

static uint64_t granularity(void) { return fake_setting_number("GRANULARITY", 2u << 20); }

/* A line for what the real driver may let pass, or crash on. */
static int misuse(const char *what, address at, uint64_t bytes) {
    ppfake_record("Fault what=%s addr=%#llx len=%llu", what, (unsigned long long)at,
                  (unsigned long long)bytes);
    return INVALID_VALUE;
}

static struct handle *handle_of(uint64_t handle) {
    uint64_t index = (handle >> 4) - 1;
    return (handle & 15) == 7 && index < handle_count && handles[index].physical ? &handles[index] : NULL;
}
static uint64_t new_handle(struct physical *p, bool imported, bool exportable) {
    *GROW(handles, handle_count) = (struct handle){p, imported, exportable};
    p->handles++;
    return (uint64_t)handle_count << 4 | 7;
}

static void drop_unused(struct physical *p) {
    if (p->handles || p->mappings) return;
    munmap(p->shadow, p->label.bytes);
    close(p->file);
    if (p->device >= 0) fake_give(p->device, p->label.bytes);
    struct physical **at = &memories;
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    free(p);
}
void fake_unmapped(struct physical *p) {
    p->mappings--;
    drop_unused(p);
}

/* Counts as memory of this process for as long as it keeps it, whoever made it. Takes the file on success. */
static int keep(int file, struct label label, struct physical **kept) {
    int device = fake_visible_device(label.device);
    int code = device < 0 ? OK : fake_take(device, label.bytes);
    if (code) return code;
    void *shadow = mmap(NULL, label.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shadow == MAP_FAILED) abort();
    *kept = malloc(sizeof **kept);
    **kept = (struct physical){
        .label = label, .file = file, .device = device, .shadow = shadow, .next = memories};
    memories = *kept;
    return OK;
}

/* CUmemAllocationProp, as cuda.h lays it out. */
struct properties {
    unsigned type, handle_types, location;
    int device;
    void *of_windows;
    uint8_t flags[8];
};

static int check_properties(const struct properties *p) {
    if (!p || p->type != PINNED || p->location != BY_DEVICE) return INVALID_VALUE;
    if (fake_check_device(p->device)) return fake_check_device(p->device);
    if (p->handle_types & ~(unsigned)BY_DESCRIPTOR) return NOT_SUPPORTED;
    return p->handle_types && !fake_setting_number("DESCRIPTORS", 1) ? NOT_SUPPORTED : OK;
}

EXPORT int cuMemGetAllocationGranularity(size_t *bytes, const struct properties *p, unsigned recommended) {
    FAULT_POINT("cuMemGetAllocationGranularity");
    int code = recommended > 1 ? INVALID_VALUE : check_properties(p);
    if (!code) *bytes = granularity();
    return code;
}

EXPORT int cuMemCreate(uint64_t *handle, size_t bytes, const struct properties *p, unsigned long long flags) {
    FAULT_POINT("cuMemCreate");
    ppfake_lock();
    int code = check_properties(p);
    if (!code && (flags || !bytes || bytes % granularity())) code = misuse("bad_size", 0, bytes);
    if (!code) {
        struct label label = {SIGN, bytes, (int)getpid(), ++made, fake_physical_device(p->device)};
        int file = memfd_create("fake device memory", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, (off_t)(bytes + PAGE)) != 0 ||
            pwrite(file, &label, sizeof label, (off_t)bytes) != sizeof label)
            abort();
        struct physical *physical;
        code = keep(file, label, &physical);
        if (code) close(file);
        else {
            *handle = new_handle(physical, false, p->handle_types & BY_DESCRIPTOR);
            ppfake_record("cuMemCreate mem=%d.%d len=%zu dev=%d", label.maker, label.number, bytes,
                          p->device);
        }
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuMemRelease(uint64_t handle) {
    FAULT_POINT("cuMemRelease");
    ppfake_lock();
    struct handle *h = handle_of(handle);
    int code = h ? OK : misuse("bad_release", handle, 0);
    if (h) {
        ppfake_record("cuMemRelease mem=%d.%d", h->physical->label.maker, h->physical->label.number);
        h->physical->handles--;
        drop_unused(h->physical);
        h->physical = NULL;
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuMemExportToShareableHandle(int *file, uint64_t handle, unsigned type, unsigned long long flags) {
    FAULT_POINT("cuMemExportToShareableHandle");
    ppfake_lock();
    struct handle *h = handle_of(handle);
    int code = !h || flags || type != BY_DESCRIPTOR || !h->exportable ? INVALID_VALUE : OK;
    if (!code) {
        *file = fcntl(h->physical->file, F_DUPFD_CLOEXEC, 0);
        if (*file < 0) code = OPERATING_SYSTEM;
        ppfake_record("cuMemExport mem=%d.%d rc=%d", h->physical->label.maker, h->physical->label.number,
                      code);
    }
    ppfake_unlock();
    return code;
}

/* The label of a descriptor; a sign of 0: it is not of device memory. */
static struct label read_label(int file) {
    struct label label = {0};
    struct stat about;
    if (fstat(file, &about) != 0 || about.st_size < (off_t)PAGE ||
        pread(file, &label, sizeof label, about.st_size - (off_t)PAGE) != sizeof label ||
        label.bytes + PAGE != (uint64_t)about.st_size)
        label.sign = 0;
    return label;
}

EXPORT int cuMemImportFromShareableHandle(uint64_t *handle, void *of_system, unsigned type) {
    FAULT_POINT("cuMemImportFromShareableHandle");
    int given = (int)(intptr_t)of_system;
    struct context *c;
    ppfake_lock();
    struct label label = read_label(given);
    int code = fake_current(&c);
    if (!code && (type != BY_DESCRIPTOR || label.sign != SIGN)) code = INVALID_VALUE;
    /* Of a device that this process cannot see. */
    if (!code && fake_visible_device(label.device) < 0) code = INVALID_DEVICE;
    if (!code) {
        struct physical *p = memories;
        while (p && (p->label.maker != label.maker || p->label.number != label.number)) p = p->next;
        int file = p ? -1 : fcntl(given, F_DUPFD_CLOEXEC, 0);
        if (!p && file < 0) code = OPERATING_SYSTEM;
        else if (!p && (code = keep(file, label, &p))) close(file);
        if (!code) {
            *handle = new_handle(p, true, true);
            ppfake_record("cuMemImport mem=%d.%d len=%llu", label.maker, label.number,
                          (unsigned long long)label.bytes);
        }
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuMemAddressReserve(address *at, size_t bytes, size_t alignment, address wanted,
                               unsigned long long flags) {
    FAULT_POINT("cuMemAddressReserve");
    (void)wanted; /* a wish only */
    ppfake_lock();
    uint64_t least = granularity();
    bool is_bad = !bytes || bytes % least || alignment & (alignment - 1) || flags;
    int code = is_bad ? misuse("bad_size", 0, bytes) : OK;
    if (!code) {
        *at = fake_addresses(MAX_DEVICES, bytes, alignment > least ? alignment : least);
        if (!*at) code = OUT_OF_MEMORY;
        else {
            *GROW(reservations, reservation_count) = (struct reservation){*at, bytes, false};
            ppfake_record("cuMemAddressReserve addr=%#llx len=%zu", (unsigned long long)*at, bytes);
        }
    }
    ppfake_unlock();
    return code;
}

static struct reservation *reservation_of(address at, uint64_t bytes) {
    for (unsigned i = 0; i < reservation_count; i++) {
        struct reservation *r = &reservations[i];
        if (!r->freed && at >= r->at && at + bytes <= r->at + r->bytes) return r;
    }
    return NULL;
}
/* The first mapping that has a byte of the range. */
static struct allocation *mapped_in(address at, uint64_t bytes) {
    for (unsigned i = 0; i < mapping_count; i++)
        if (!mappings[i]->freed && mappings[i]->at < at + bytes && at < mappings[i]->at + mappings[i]->bytes)
            return mappings[i];
    return NULL;
}
static struct allocation *mapping_of(address at, uint64_t bytes) {
    struct allocation *m = mapped_in(at, bytes);
    return m && m->at == at && m->bytes == bytes ? m : NULL;
}

EXPORT int cuMemAddressFree(address at, size_t bytes) {
    FAULT_POINT("cuMemAddressFree");
    ppfake_lock();
    struct reservation *r = reservation_of(at, bytes);
    int code = OK;
    if (!r || r->at != at || r->bytes != bytes) code = misuse("bad_address_free", at, bytes);
    else if (mapped_in(at, bytes)) code = misuse("address_freed_while_mapped", at, bytes);
    if (!code) {
        ppfake_record("cuMemAddressFree addr=%#llx len=%zu", (unsigned long long)at, bytes);
        r->freed = true;
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuMemMap(address at, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    FAULT_POINT("cuMemMap");
    ppfake_lock();
    struct handle *h = handle_of(handle);
    int code = OK;
    if (!h || flags || offset) code = misuse("bad_map", at, bytes);
    else if (!bytes || bytes % granularity() || bytes > h->physical->label.bytes)
        code = misuse("bad_size", at, bytes);
    else if (at % granularity() || !reservation_of(at, bytes) || mapped_in(at, bytes))
        code = misuse("bad_map", at, bytes);
    if (!code) {
        struct physical *p = h->physical;
        *GROW(mappings, mapping_count) = fake_add((struct allocation){.at = at,
                                                                      .bytes = bytes,
                                                                      .mapped = bytes,
                                                                      .shadow = p->shadow,
                                                                      .kind = MAPPED,
                                                                      .physical = p,
                                                                      .of_peer = h->imported});
        p->mappings++;
        ppfake_record("cuMemMap addr=%#llx len=%zu mem=%d.%d peer=%d", (unsigned long long)at, bytes,
                      p->label.maker, p->label.number, h->imported);
    }
    ppfake_unlock();
    return code;
}

/* CUmemAccessDesc */
struct right {
    unsigned location;
    int device;
    unsigned flags;
};

/* Whether a device may touch memory of another one. */
static bool reaches(int device, const struct physical *p) {
    return fake_physical_device(device) == p->label.device || fake_peers() != NO_PEERS;
}

EXPORT int cuMemSetAccess(address at, size_t bytes, const struct right *rights, size_t count) {
    FAULT_POINT("cuMemSetAccess");
    ppfake_lock();
    struct allocation *m = mapping_of(at, bytes);
    int code = m && rights && count ? OK : misuse("bad_access", at, bytes);
    for (size_t i = 0; i < count && !code; i++) {
        const struct right *r = &rights[i];
        if (r->location != BY_DEVICE || (r->flags && r->flags != READ_AND_WRITE))
            code = misuse("bad_access", at, bytes);
        else if (fake_check_device(r->device) || !reaches(r->device, m->physical)) code = INVALID_DEVICE;
        else if (r->flags) m->access |= 1u << r->device;
        else m->access &= ~(1u << r->device);
        if (!code)
            ppfake_record("cuMemSetAccess addr=%#llx len=%zu dev=%d flags=%u", (unsigned long long)at, bytes,
                          r->device, r->flags);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuMemUnmap(address at, size_t bytes) {
    FAULT_POINT("cuMemUnmap");
    ppfake_lock();
    struct allocation *m = mapping_of(at, bytes);
    int code = m ? OK : misuse("bad_unmap", at, bytes);
    if (m) {
        ppfake_record("cuMemUnmap addr=%#llx len=%zu", (unsigned long long)at, bytes);
        fake_release(m);
    }
    ppfake_unlock();
    return code;
}
