/* Events. A wait and a query mean the recording that was newest when they were called, as CUDA says; a later
 * recording does not move them. */
#include "fake.h"

#include <stdlib.h>

#define EVENT_MAGIC 0xE7E27u
#define DISABLE_TIMING 2u

struct event {
    uint32_t magic;
    int id, device;
    unsigned flags;
    struct mark *mark; /* NULL: never recorded */
};

static int event_count;

struct mark *ppfake_mark_new(void) {
    struct mark *mark = calloc(1, sizeof *mark);
    mark->references = 1;
    return mark;
}
void ppfake_mark_release(struct mark *mark) {
    if (mark && --mark->references == 0) free(mark);
}

static void reach(struct stream *s, void *argument) {
    (void)s;
    struct mark *mark = argument;
    ppfake_lock();
    mark->done = true;
    mark->ns = ppfake_now();
    ppfake_mark_release(mark);
    ppfake_changed();
    ppfake_unlock();
}
static void wait_for(struct stream *s, void *argument) {
    (void)s;
    struct mark *mark = argument;
    ppfake_lock();
    while (!mark->done) ppfake_wait();
    ppfake_mark_release(mark);
    ppfake_unlock();
}
void ppfake_mark_record(struct stream *stream, struct mark *mark) {
    mark->references++;
    ppfake_enqueue(stream, reach, mark);
}
void ppfake_mark_wait(struct stream *stream, struct mark *mark) {
    mark->references++;
    ppfake_enqueue(stream, wait_for, mark);
}

static struct event *event_of(void *handle) {
    struct event *e = handle;
    return e && e->magic == EVENT_MAGIC ? e : NULL;
}

EXPORT int cuEventCreate(void **event, unsigned flags) {
    FAULT_POINT("cuEventCreate");
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    if (!code) {
        struct event *e = calloc(1, sizeof *e);
        *e = (struct event){EVENT_MAGIC, ++event_count, c->device, flags, NULL};
        ppfake_record("cuEventCreate ev=%d dev=%d flags=%u", e->id, c->device, flags);
        *event = e;
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuEventDestroy_v2(void *handle) {
    FAULT_POINT("cuEventDestroy");
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct event *e = event_of(handle);
    if (!code && !e) code = INVALID_HANDLE;
    if (!code) {
        ppfake_record("cuEventDestroy ev=%d", e->id);
        ppfake_mark_release(e->mark);
        e->mark = NULL;
        e->magic = 0; /* the structure stays: a use after destruction must be seen */
    }
    ppfake_unlock();
    return code;
}

/* The context, stream and event of a call, or the code to return. */
static int enter(void *event, void *stream, struct event **e, struct stream **s) {
    struct context *c;
    int code = fake_current(&c);
    if (code) return code;
    *e = event_of(event);
    *s = fake_stream(c, stream);
    return *e && *s ? OK : INVALID_HANDLE;
}

EXPORT int cuEventRecord(void *event, void *stream) {
    FAULT_POINT("cuEventRecord");
    struct event *e;
    struct stream *s;
    ppfake_lock();
    int code = enter(event, stream, &e, &s);
    if (!code && e->device != s->device) code = INVALID_HANDLE;
    if (!code) {
        ppfake_mark_release(e->mark);
        e->mark = ppfake_mark_new();
        ppfake_record("cuEventRecord ev=%d st=%d", e->id, s->id);
        ppfake_mark_record(s, e->mark);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    FAULT_POINT("cuStreamWaitEvent");
    (void)flags;
    struct event *e;
    struct stream *s;
    ppfake_lock();
    int code = enter(event, stream, &e, &s);
    if (!code) {
        ppfake_record("cuStreamWaitEvent ev=%d st=%d", e->id, s->id);
        if (e->mark) ppfake_mark_wait(s, e->mark);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuEventQuery(void *handle) {
    FAULT_POINT("cuEventQuery");
    ppfake_lock();
    struct event *e = event_of(handle);
    struct context *c = e ? fake_context_of(e->device) : NULL;
    int code = !e ? INVALID_HANDLE : c && c->sticky ? c->sticky : !e->mark || e->mark->done ? OK : NOT_READY;
    /* A "not yet" orders nothing, and drivers poll: only the answer that counts is written down. */
    if (e && code != NOT_READY) ppfake_record("cuEventQuery ev=%d rc=%d", e->id, code);
    ppfake_unlock();
    return code;
}

EXPORT int cuEventSynchronize(void *handle) {
    FAULT_POINT("cuEventSynchronize");
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct event *e = event_of(handle);
    if (!code && !e) code = INVALID_HANDLE;
    if (!code) {
        ppfake_record("cuEventSynchronize ev=%d phase=begin", e->id);
        struct mark *mark = e->mark;
        if (mark) {
            mark->references++;
            while (!mark->done) ppfake_wait();
            ppfake_mark_release(mark);
        }
        code = c->sticky;
        ppfake_record("cuEventSynchronize ev=%d phase=end rc=%d", e->id, code);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    FAULT_POINT("cuEventElapsedTime");
    ppfake_lock();
    struct event *a = event_of(start), *b = event_of(end);
    int code = OK;
    if (!a || !b || !a->mark || !b->mark || ((a->flags | b->flags) & DISABLE_TIMING)) code = INVALID_HANDLE;
    else if (!a->mark->done || !b->mark->done) code = NOT_READY;
    else *milliseconds = (float)((double)(int64_t)(b->mark->ns - a->mark->ns) / 1e6);
    ppfake_unlock();
    return code;
}
EXPORT int cuEventElapsedTime_v2(float *milliseconds, void *start, void *end) {
    return cuEventElapsedTime(milliseconds, start, end);
}
