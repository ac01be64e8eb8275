/* ncclSend and ncclRecv, and the faults that a test can put into them. */
#define _GNU_SOURCE
#include "nccl.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static int operations;

unsigned type_bytes(int type) {
    static const unsigned size[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && (size_t)type < sizeof size / sizeof *size ? size[type] : 0;
}

static int issue(struct comm *c, struct stream *stream, struct transfer t) {
    struct batch *b = group_batch(c, stream);
    int code = batch_add(b, t);
    batch_name(b, t.id);
    return code == NCCL_OK && group_depth() == 0 ? group_close() : code;
}

extern int cuStreamSynchronize(void *stream);

static int transfer(bool sending, address at, size_t count, int type, int peer, void *handle,
                    void *stream_handle, struct fault fault) {
    const char *name = sending ? "ncclSend" : "ncclRecv";
    struct comm *c;
    ppfake_lock();
    int code = comm_enter(handle, name, &c);
    struct stream *stream = code ? NULL : ppfake_stream(c->device, stream_handle);
    if (!code && (!stream || peer < 0 || peer >= c->ranks || !type_bytes(type) || (!at && count))) {
        comm_error("%s: bad stream, peer %d, type %d or address", name, peer, type);
        code = NCCL_ARGUMENT;
    }
    struct transfer t = {
        .sending = sending, .peer = peer, .type = type, .at = at, .bytes = count * type_bytes(type)};
    struct transfer *held = NULL;
    struct stream *held_stream = NULL;
    if (!code) {
        if (fault.kind == FAULT_HALF) t.bytes /= 2;
        t.id = ++operations;
        ppfake_record("%s comm=%d peer=%d dt=%d len=%llu st=%d depth=%d op=%d %c=%#llx:%llu", name, c->id,
                      peer, type, (unsigned long long)t.bytes, ppfake_stream_id(stream), group_depth(), t.id,
                      sending ? 'r' : 'w', (unsigned long long)at, (unsigned long long)t.bytes);
        held = c->held, held_stream = c->held_stream;
        c->held = NULL;
        if (fault.kind == FAULT_SWAP) {
            c->held = malloc(sizeof t);
            *c->held = t;
            c->held_stream = stream;
        }
    }
    ppfake_unlock();
    if (code || fault.kind == FAULT_SWAP) return code;
    code = issue(c, stream, t);
    if (held) {
        if (!code) code = issue(c, held_stream, *held);
        free(held);
    }
    if (fault.kind == FAULT_FREE) ppfake_free_under(at);
    if (fault.kind == FAULT_SYNC) cuStreamSynchronize(stream_handle);
    return code;
}

/* The fault `thread`: the same call, from a thread that must not call. */
struct call {
    bool sending;
    address at;
    size_t count;
    int type, peer, device, code;
    void *comm, *stream;
};
extern int cuDevicePrimaryCtxRetain(void **context, int device);
extern int cuCtxSetCurrent(void *context);
static void *elsewhere(void *argument) {
    struct call *call = argument;
    void *context;
    cuDevicePrimaryCtxRetain(&context, call->device);
    cuCtxSetCurrent(context);
    call->code = transfer(call->sending, call->at, call->count, call->type, call->peer, call->comm,
                          call->stream, (struct fault){FAULT_NONE, 0});
    return NULL;
}

static int entry(bool sending, address at, size_t count, int type, int peer, void *comm, void *stream) {
    const char *name = sending ? "ncclSend" : "ncclRecv";
    struct fault fault = ppfake_fault(name);
    if (fault.kind == FAULT_CODE) return fault.code;
    if (fault.kind == FAULT_SKIP) return NCCL_OK;
    if (fault.kind == FAULT_HANG) ppfake_hang();
    if (fault.kind == FAULT_THREAD && group_depth() == 0) {
        struct call call = {sending, at, count, type, peer, ppfake_current_device(), 0, comm, stream};
        pthread_t thread;
        if (pthread_create(&thread, NULL, elsewhere, &call) != 0) return NCCL_SYSTEM;
        pthread_join(thread, NULL);
        return call.code;
    }
    return transfer(sending, at, count, type, peer, comm, stream, fault);
}

EXPORT int ncclSend(const void *from, size_t count, int type, int peer, void *comm, void *stream) {
    return entry(true, (address)(uintptr_t)from, count, type, peer, comm, stream);
}
EXPORT int ncclRecv(void *to, size_t count, int type, int peer, void *comm, void *stream) {
    return entry(false, (address)(uintptr_t)to, count, type, peer, comm, stream);
}
