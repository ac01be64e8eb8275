/* Streams: first in, first out, each on a thread of its own, with random pauses from a seed. Two streams are
 * ordered by events and by nothing else. */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STREAM_MAGIC 0x57E4A3u

struct op {
    struct op *next;
    op_run run;
    void *argument;
};

static struct stream *streams;
static int stream_count;

uint64_t fake_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

void ppfake_pause(struct stream *stream) {
    uint64_t longest = fake_setting_number("DELAY_US", 60), drawn = fake_random(&stream->random);
    if (longest && (drawn & 3) == 0) usleep((useconds_t)((drawn >> 8) % longest));
}

static void *work(void *argument) {
    struct stream *s = argument;
    ppfake_worker_thread();
    ppfake_lock();
    for (;;) {
        struct op *op = s->head;
        if (!op && s->closing) break;
        if (!op) {
            ppfake_wait();
            continue;
        }
        s->head = op->next;
        if (!s->head) s->tail = NULL;
        ppfake_unlock();
        ppfake_pause(s);
        op->run(s, op->argument);
        free(op);
        ppfake_lock();
        s->finished++;
        ppfake_changed();
    }
    s->magic = 0; /* the structure stays: a use after destruction must be seen */
    ppfake_unlock();
    return NULL;
}

void ppfake_enqueue(struct stream *s, op_run run, void *argument) {
    struct op *op = malloc(sizeof *op);
    *op = (struct op){NULL, run, argument};
    if (s->tail) s->tail->next = op;
    else s->head = op;
    s->tail = op;
    s->queued++;
    ppfake_changed();
}

static struct stream *create(int device, unsigned flags) {
    struct stream *s = calloc(1, sizeof *s);
    s->magic = STREAM_MAGIC;
    s->id = ++stream_count;
    s->device = device;
    s->flags = flags;
    s->random = (fake_setting_number("SEED", 1) + 1) * 0x9E3779B97F4A7C15ull ^
                (uint64_t)s->id * 0xD1B54A32D192ED03ull;
    s->next = streams;
    streams = s;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    if (pthread_create(&thread, &attributes, work, s) != 0) abort();
    pthread_attr_destroy(&attributes);
    return s;
}

struct stream *fake_stream(struct context *context, void *handle) {
    if ((uintptr_t)handle <= 2) {
        if (!context->legacy) context->legacy = create(context->device, 0);
        return context->legacy;
    }
    struct stream *s = handle;
    return s->magic == STREAM_MAGIC && !s->closing ? s : NULL;
}

struct stream *ppfake_stream(int device, void *handle) {
    struct context *context = fake_context_of(device);
    return context ? fake_stream(context, handle) : NULL;
}
int ppfake_stream_id(struct stream *stream) { return stream->id; }

void fake_wait_stream(struct stream *s, uint64_t operations) {
    while (s->finished < operations) ppfake_wait();
}

void fake_wait_device(int device) {
    for (struct stream *s = streams; s; s = s->next)
        if (s->device == device) fake_wait_stream(s, s->queued);
}

EXPORT int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    FAULT_POINT("cuStreamCreate");
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    if (!code) {
        struct stream *s = create(c->device, flags);
        ppfake_record("cuStreamCreate st=%d dev=%d flags=%u priority=%d", s->id, c->device, flags, priority);
        *stream = s;
    }
    ppfake_unlock();
    return code;
}
EXPORT int cuStreamCreate(void **stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

/* The context and the stream of a call, or the code to return. */
static int enter(void *handle, struct context **c, struct stream **s) {
    int code = fake_current(c);
    if (!code && !(*s = fake_stream(*c, handle))) code = INVALID_HANDLE;
    return code;
}

EXPORT int cuStreamDestroy_v2(void *handle) {
    FAULT_POINT("cuStreamDestroy");
    struct context *c;
    struct stream *s;
    ppfake_lock();
    int code = enter(handle, &c, &s);
    if (!code) {
        ppfake_record("cuStreamDestroy st=%d", s->id);
        s->closing = true; /* what is queued still runs */
        ppfake_changed();
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuStreamQuery(void *handle) {
    FAULT_POINT("cuStreamQuery");
    struct context *c;
    struct stream *s;
    ppfake_lock();
    int code = enter(handle, &c, &s);
    if (!code) {
        code = s->finished == s->queued ? OK : NOT_READY;
        ppfake_record("cuStreamQuery st=%d rc=%d", s->id, code);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuStreamSynchronize(void *handle) {
    FAULT_POINT("cuStreamSynchronize");
    struct context *c;
    struct stream *s;
    ppfake_lock();
    int code = enter(handle, &c, &s);
    if (!code) {
        ppfake_record("cuStreamSynchronize st=%d phase=begin", s->id);
        uint64_t all = s->queued;
        fake_wait_stream(s, all);
        code = c->sticky;
        ppfake_record("cuStreamSynchronize st=%d phase=end rc=%d", s->id, code);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuStreamGetPriority(void *stream, int *priority) { return (void)stream, *priority = 0, OK; }
EXPORT int cuStreamIsCapturing(void *stream, int *status) { return (void)stream, *status = 0, OK; }
EXPORT int cuStreamGetCtx(void *handle, void **context) {
    struct context *c;
    struct stream *s;
    ppfake_lock();
    int code = enter(handle, &c, &s);
    if (!code) *context = fake_context_of(s->device);
    ppfake_unlock();
    return code;
}

struct host_call {
    void (*call)(void *);
    void *data;
};
static void run_host_call(struct stream *s, void *argument) {
    (void)s;
    struct host_call *h = argument;
    h->call(h->data);
    free(h);
}
EXPORT int cuLaunchHostFunc(void *handle, void (*call)(void *), void *data) {
    FAULT_POINT("cuLaunchHostFunc");
    struct context *c;
    struct stream *s;
    ppfake_lock();
    int code = enter(handle, &c, &s);
    if (!code) {
        struct host_call *h = malloc(sizeof *h);
        *h = (struct host_call){call, data};
        ppfake_record("cuLaunchHostFunc st=%d", s->id);
        ppfake_enqueue(s, run_host_call, h);
    }
    ppfake_unlock();
    return code;
}
