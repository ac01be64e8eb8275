/* Copies and fills. The bytes move on the stream's thread, in two halves with a pause between: a reader
 * that looks too early sees a torn buffer. */
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct copy {
    address to, from;
    uint64_t width, height, to_pitch, from_pitch;
    int value; /* -1: copy; else fill */
    bool flips;
};

static uint64_t extent(uint64_t width, uint64_t height, uint64_t pitch) {
    return height ? pitch * (height - 1) + width : 0;
}

static void rows(const struct copy *c, uint8_t *to, const uint8_t *from, uint64_t first, uint64_t end) {
    for (uint64_t y = first; y < end; y++)
        if (c->value >= 0) memset(to + y * c->to_pitch, c->value, c->width);
        else memmove(to + y * c->to_pitch, from + y * c->from_pitch, c->width);
}

static void run(struct stream *s, void *argument) {
    struct copy *c = argument;
    uint8_t *to = ppfake_pin(s->device, c->to, extent(c->width, c->height, c->to_pitch), "copy");
    uint8_t *from = c->value < 0
                        ? ppfake_pin(s->device, c->from, extent(c->width, c->height, c->from_pitch), "copy")
                        : to;
    if (to && from) {
        struct copy half = *c;
        if (c->height == 1) {
            half.width = c->width / 2;
            rows(&half, to, from, 0, 1);
            ppfake_pause(s);
            half.width = c->width - c->width / 2;
            rows(&half, to + c->width / 2, from + c->width / 2, 0, 1);
        } else {
            rows(c, to, from, 0, c->height / 2);
            ppfake_pause(s);
            rows(c, to, from, c->height / 2, c->height);
        }
        if (c->flips) to[c->width / 2] ^= 1;
    }
    if (to) ppfake_unpin(c->to);
    if (from && c->value < 0) ppfake_unpin(c->from);
    free(c);
}

/* Queues a copy; `wait` makes it one of the synchronous calls. */
static int queue(const char *name, struct copy copy, void *handle, bool wait) {
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct stream *s = code ? NULL : fake_stream(c, handle);
    if (!code && !s) code = INVALID_HANDLE;
    if (!code && copy.width && copy.height) {
        char reads[64] = "";
        unsigned long long to_bytes = extent(copy.width, copy.height, copy.to_pitch);
        if (copy.value < 0)
            snprintf(reads, sizeof reads, " r=%#llx:%llu", (unsigned long long)copy.from,
                     (unsigned long long)extent(copy.width, copy.height, copy.from_pitch));
        struct allocation *target = fake_find(copy.to);
        const char *whose = target && target->kind == MAPPED && target->of_peer ? " peer=1" : "";
        if (fake_is_shared(target) || (copy.value < 0 && fake_is_shared(fake_find(copy.from)))) whose = " shared=1";
        ppfake_record("%s st=%d%s w=%#llx:%llu%s", name, s->id, reads, (unsigned long long)copy.to, to_bytes,
                      whose);
        struct copy *kept = malloc(sizeof *kept);
        *kept = copy;
        ppfake_enqueue(s, run, kept);
        if (wait) {
            ppfake_record("cuStreamSynchronize st=%d phase=begin", s->id);
            fake_wait_stream(s, s->queued);
            code = c->sticky;
            ppfake_record("cuStreamSynchronize st=%d phase=end rc=%d", s->id, code);
        }
    }
    ppfake_unlock();
    return code;
}

static struct copy line(address to, address from, uint64_t bytes) {
    return (struct copy){to, from, bytes, 1, bytes, bytes, -1, false};
}
static struct copy fill(address to, unsigned char value, uint64_t bytes) {
    return (struct copy){to, 0, bytes, 1, bytes, 0, value, false};
}
#define HOST(p) ((address)(uintptr_t)(p))

EXPORT int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t n, void *stream) {
    FAULT_POINT("cuMemcpyHtoDAsync");
    return queue("cuMemcpyHtoDAsync", line(to, HOST(from), n), stream, false);
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, address from, size_t n, void *stream) {
    FAULT_POINT("cuMemcpyDtoHAsync");
    return queue("cuMemcpyDtoHAsync", line(HOST(to), from, n), stream, false);
}
static int within_devices(const char *name, address to, address from, size_t n, void *stream) {
    struct fault fault = ppfake_fault(name);
    FAULT_TAKES(fault);
    struct copy copy = line(to, from, n);
    copy.flips = fault.kind == FAULT_FLIP;
    return queue(name, copy, stream, false);
}
EXPORT int cuMemcpyDtoDAsync_v2(address to, address from, size_t n, void *stream) {
    return within_devices("cuMemcpyDtoDAsync", to, from, n, stream);
}
EXPORT int cuMemcpyAsync(address to, address from, size_t n, void *stream) {
    return within_devices("cuMemcpyAsync", to, from, n, stream);
}
EXPORT int cuMemcpyHtoD_v2(address to, const void *from, size_t n) {
    return queue("cuMemcpyHtoD", line(to, HOST(from), n), NULL, true);
}
EXPORT int cuMemcpyDtoH_v2(void *to, address from, size_t n) {
    return queue("cuMemcpyDtoH", line(HOST(to), from, n), NULL, true);
}
EXPORT int cuMemcpyDtoD_v2(address to, address from, size_t n) {
    return queue("cuMemcpyDtoD", line(to, from, n), NULL, true);
}
EXPORT int cuMemsetD8Async(address to, unsigned char value, size_t n, void *stream) {
    FAULT_POINT("cuMemsetD8Async");
    return queue("cuMemsetD8Async", fill(to, value, n), stream, false);
}
EXPORT int cuMemsetD8_v2(address to, unsigned char value, size_t n) {
    return queue("cuMemsetD8", fill(to, value, n), NULL, true);
}

/* CUDA_MEMCPY2D, as cuda.h lays it out. */
struct copy_2d {
    size_t from_x, from_y;
    int from_type;
    const void *from_host;
    address from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void *to_host;
    address to_device;
    void *to_array;
    size_t to_pitch, width, height;
};
enum { HOST_MEMORY = 1 };

static struct copy rectangle(const struct copy_2d *d) {
    address to = d->to_type == HOST_MEMORY ? HOST(d->to_host) : d->to_device;
    address from = d->from_type == HOST_MEMORY ? HOST(d->from_host) : d->from_device;
    uint64_t to_pitch = d->to_pitch ? d->to_pitch : d->width,
             from_pitch = d->from_pitch ? d->from_pitch : d->width;
    return (struct copy){to + d->to_y * to_pitch + d->to_x,
                         from + d->from_y * from_pitch + d->from_x,
                         d->width,
                         d->height,
                         to_pitch,
                         from_pitch,
                         -1,
                         false};
}
EXPORT int cuMemcpy2DAsync_v2(const struct copy_2d *d, void *stream) {
    FAULT_POINT("cuMemcpy2DAsync");
    if ((d->to_pitch && d->to_pitch < d->width) || (d->from_pitch && d->from_pitch < d->width))
        return 1; // CUDA_ERROR_INVALID_VALUE, as the driver has it.
    return queue("cuMemcpy2DAsync", rectangle(d), stream, false);
}
