/* Words that a stream writes, for hosts to read: in memory of a device, or in page-locked memory. */
#include "memory.h"

#include <stdlib.h>

enum { WITHOUT_FENCE = 1 };

struct word {
    address at;
    uint32_t value;
};

static void run(struct stream *s, void *argument) {
    struct word *w = argument;
    uint8_t *at = ppfake_pin(s->device, w->at, 4, "write_value");
    if (at) {
        __atomic_store_n((uint32_t *)(void *)at, w->value, __ATOMIC_RELEASE);
        ppfake_unpin(w->at);
    }
    free(w);
}

EXPORT int cuStreamWriteValue32_v2(void *handle, address at, uint32_t value, unsigned flags) {
    struct fault fault = ppfake_fault("cuStreamWriteValue32");
    FAULT_TAKES(fault);
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct stream *s = code ? NULL : fake_stream(c, fault.kind == FAULT_OTHER ? NULL : handle);
    struct allocation *a = fake_find(at);
    if (!code && !s) code = INVALID_HANDLE;
    if (!code && (at % 4 || flags & ~(unsigned)WITHOUT_FENCE || !a || a->freed)) {
        ppfake_record("Fault what=bad_word addr=%#llx", (unsigned long long)at);
        code = INVALID_VALUE;
    }
    if (!code && fault.kind == FAULT_EARLY) {
        ppfake_record("HostStore addr=%#llx value=%u", (unsigned long long)at, value);
        __atomic_store_n((uint32_t *)(void *)(a->shadow + (at - a->at)), value, __ATOMIC_RELEASE);
    } else if (!code) {
        ppfake_record("cuStreamWriteValue32 st=%d addr=%#llx value=%u flags=%u", s->id,
                      (unsigned long long)at, value, flags);
        struct word *kept = malloc(sizeof *kept);
        *kept = (struct word){at, value};
        ppfake_enqueue(s, run, kept);
    }
    ppfake_unlock();
    return code;
}
