/* Groups: what a thread issues between start and end becomes one batch per communicator, and a batch is one
 * operation on a stream in which all transfers make progress together. Batches of one communicator run one
 * after the other, whatever their streams. */
#define _GNU_SOURCE
#include "nccl.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct batch {
    struct comm *comm;
    struct stream *stream[8];
    unsigned streams, count;
    struct transfer transfer[MAX_BATCH];
    char names[MAX_BATCH * 12]; /* of the calls in it, for the recording */
    uint64_t number;
    void (*then)(void *argument, bool complete);
    void *argument;
    int thread; /* that issued it, for the recording */
    struct batch *next;
};

static __thread int depth;
static __thread struct batch *first;
static __thread struct comm *aborted[16];
static __thread unsigned abort_count;

int group_depth(void) { return depth; }

struct batch *group_batch(struct comm *comm, struct stream *stream) {
    struct batch **at = &first;
    while (*at && ((*at)->comm != comm || (*at)->then)) at = &(*at)->next;
    if (!*at) {
        *at = calloc(1, sizeof **at);
        (*at)->comm = comm;
    }
    struct batch *b = *at;
    unsigned i = 0;
    while (i < b->streams && b->stream[i] != stream) i++;
    if (i == b->streams && i < sizeof b->stream / sizeof *b->stream) b->stream[b->streams++] = stream;
    return b;
}

int batch_add(struct batch *batch, struct transfer transfer) {
    if (batch->count == MAX_BATCH) return NCCL_INTERNAL;
    transfer.self = batch->comm->rank;
    batch->transfer[batch->count++] = transfer;
    return NCCL_OK;
}

void batch_name(struct batch *batch, int call) {
    size_t n = strlen(batch->names);
    snprintf(batch->names + n, sizeof batch->names - n, "%s%d", n ? "," : "", call);
}

void batch_then(struct batch *batch, void (*then)(void *argument, bool complete), void *argument) {
    batch->then = then;
    batch->argument = argument;
}

bool group_add_abort(struct comm *comm) {
    if (depth == 0 || abort_count == sizeof aborted / sizeof *aborted) return false;
    aborted[abort_count++] = comm;
    return true;
}

/* Moves everything that can move until all is done or the communicator is stopped. */
static bool progress(struct stream *stream, struct batch *b) {
    for (;;) {
        uint32_t seen = wire_bell(b->comm->wire, b->comm->rank);
        bool moved = false;
        unsigned done = 0;
        for (unsigned i = 0; i < b->count; i++) {
            bool before = !b->transfer[i].sending && b->transfer[i].moved;
            moved |= wire_move(b->comm->wire, &b->transfer[i]);
            done += b->transfer[i].phase == DONE;
            if (before && moved) ppfake_pause(stream); /* a receive under way is seen half done */
        }
        if (done == b->count) return true;
        if (b->comm->stopped) return false;
        if (!moved) wire_wait(b->comm->wire, b->comm->rank, seen);
    }
}

static void run(struct stream *stream, void *argument) {
    struct batch *b = argument;
    struct comm *c = b->comm;
    ppfake_lock();
    while (c->done + 1 < b->number && !c->stopped) ppfake_wait();
    bool stopped = c->stopped;
    c->running++;
    ppfake_unlock();
    bool complete = false, ready = !stopped;
    for (unsigned i = 0; i < b->count && ready; i++) {
        struct transfer *t = &b->transfer[i];
        if (t->at && t->bytes)
            t->host = ppfake_pin(c->device, t->at, t->bytes, t->sending ? "ncclSend" : "ncclRecv");
        ready = t->host || !t->bytes;
    }
    if (ready) {
        ppfake_pause(stream);
        complete = progress(stream, b);
    }
    for (unsigned i = 0; i < b->count; i++)
        if (b->transfer[i].at && b->transfer[i].host) ppfake_unpin(b->transfer[i].at);
    if (b->then) b->then(b->argument, complete);
    ppfake_lock();
    c->running--;
    if (c->done < b->number) c->done = b->number;
    comm_end(c);
    ppfake_changed();
    ppfake_unlock();
    free(b);
}

/* Under the lock. */
static void launch(struct batch *b) {
    b->number = ++b->comm->issued;
    struct stream *main = b->stream[0];
    for (unsigned i = 1; i < b->streams; i++) {
        struct mark *before = ppfake_mark_new();
        ppfake_record("Order from=%d to=%d", ppfake_stream_id(b->stream[i]), ppfake_stream_id(main));
        ppfake_mark_record(b->stream[i], before);
        ppfake_mark_wait(main, before);
        ppfake_mark_release(before);
    }
    ppfake_record("NcclLaunch comm=%d st=%d ops=%s", b->comm->id, ppfake_stream_id(main), b->names);
    struct stream *others[8];
    unsigned count = b->streams;
    memcpy(others, b->stream, sizeof others);
    ppfake_enqueue(main, run, b);
    for (unsigned i = 1; i < count; i++) {
        struct mark *after = ppfake_mark_new();
        ppfake_record("Order from=%d to=%d", ppfake_stream_id(main), ppfake_stream_id(others[i]));
        ppfake_mark_record(main, after);
        ppfake_mark_wait(others[i], after);
        ppfake_mark_release(after);
    }
}

/* Says for each connection of the batch that this end is there, and waits for the other ends; false when it was
 * stopped before they all were there. */
static bool connect_all(struct batch *b, const volatile bool *stop) {
    if (ppfake_setting_number("NCCL_LAZY", 1) == 0) return true;
    bool all = true;
    for (unsigned i = 0; i < b->count; i++) {
        struct transfer *t = &b->transfer[i];
        int from = t->sending ? b->comm->rank : t->peer, to = t->sending ? t->peer : b->comm->rank;
        all &= wire_connect(b->comm->wire, from, to, t->sending, stop);
    }
    return all;
}

/* The first use of a connection waits for the peer's first use; then the batch is launched. */
static int connect_and_launch(struct batch *b) {
    struct comm *c = b->comm;
    bool connected = connect_all(b, &c->stopped);
    if (!connected) comm_error("the communicator was aborted while it connected");
    ppfake_lock();
    if (!c->blocking) c->polls = (int)ppfake_setting_number("NCCL_POLLS", 2);
    if (c->async == NCCL_IN_PROGRESS) c->async = connected ? NCCL_OK : NCCL_INTERNAL;
    if (connected && b->streams) launch(b);
    else free(b);
    c->running--;
    comm_end(c);
    ppfake_changed();
    ppfake_unlock();
    return connected ? NCCL_OK : NCCL_INTERNAL;
}

static void *connect_later(void *batch) {
    ppfake_act_for(((struct batch *)batch)->thread);
    connect_and_launch(batch);
    return NULL;
}

/* Issues a batch. A communicator that does not block never waits here for its peer: it is in progress until the
 * peer's end is there. */
static int issue(struct batch *b) {
    struct comm *c = b->comm;
    const volatile bool at_once = true;
    ppfake_lock();
    c->running++; /* it must not go away while this waits */
    bool later = !connect_all(b, &at_once) && !c->blocking;
    if (later) c->async = NCCL_IN_PROGRESS;
    b->thread = ppfake_thread();
    ppfake_unlock();
    int code = NCCL_OK;
    pthread_t thread;
    if (!later || pthread_create(&thread, NULL, connect_later, b) != 0) code = connect_and_launch(b);
    else pthread_detach(thread);
    return code == NCCL_OK && !c->blocking ? NCCL_IN_PROGRESS : code;
}

static void end_aborts(void) {
    if (!abort_count) return;
    ppfake_lock();
    for (unsigned i = 0; i < abort_count; i++) comm_stop(aborted[i]);
    for (unsigned i = 0; i < abort_count; i++) {
        while (aborted[i]->running) ppfake_wait();
        aborted[i]->ended = true;
        comm_end(aborted[i]);
    }
    abort_count = 0;
    ppfake_unlock();
    usleep((useconds_t)(1000 * ppfake_setting_number("NCCL_ABORT_MS", 20)));
}

int group_close(void) {
    int code = NCCL_OK;
    for (struct batch *b = first, *next; b; b = next) {
        next = b->next;
        if (code != NCCL_OK && code != NCCL_IN_PROGRESS) {
            free(b);
            continue;
        }
        int issued = issue(b);
        if (issued != NCCL_OK) code = issued;
    }
    first = NULL;
    end_aborts();
    return code;
}

EXPORT int ncclGroupStart(void) {
    NCCL_FAULT_POINT("ncclGroupStart");
    depth++;
    return NCCL_OK;
}

EXPORT int ncclGroupEnd(void) {
    NCCL_FAULT_POINT("ncclGroupEnd");
    if (depth == 0) return comm_error("ncclGroupEnd: not in a group call"), NCCL_USAGE;
    if (--depth > 0) return NCCL_OK;
    ppfake_lock();
    ppfake_record("ncclGroupEnd");
    ppfake_unlock();
    return group_close();
}
