/* AllReduce and Broadcast, made of transfers between all ranks. Slow and simple: everybody gets everybody's
 * contribution. */
#include "nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct collective {
    int device, type, operation, ranks, rank, root;
    address from, to;
    uint64_t bytes;
    uint8_t *mine, *received[MAX_RANKS];
};


enum { SUM = 0, PROD = 1, MAX = 2, MIN = 3, AVG = 4 };
#define COMBINE(a, b)                              \
    (operation == MAX    ? ((a) > (b) ? (a) : (b)) \
     : operation == MIN  ? ((a) < (b) ? (a) : (b)) \
     : operation == PROD ? (a) * (b)               \
                         : (a) + (b))
#define FOLD(T)                                        \
    for (uint64_t i = 0; i < bytes / sizeof(T); i++) { \
        T a, b;                                        \
        memcpy(&a, into + i * sizeof(T), sizeof(T));   \
        memcpy(&b, other + i * sizeof(T), sizeof(T));  \
        a = (T)COMBINE(a, b);                          \
        memcpy(into + i * sizeof(T), &a, sizeof(T));   \
    }                                                  \
    break

static void fold(uint8_t *into, const uint8_t *other, uint64_t bytes, int type, int operation) {
    switch (type) {
    case 0: FOLD(int8_t);
    case 1: FOLD(uint8_t);
    case 2: FOLD(int32_t);
    case 3: FOLD(uint32_t);
    case 4: FOLD(int64_t);
    case 5: FOLD(uint64_t);
    case 7: FOLD(float);
    case 8: FOLD(double);
    case 9:
        for (uint64_t i = 0; i < bytes; i += 2) {
            uint16_t a, b;
            memcpy(&a, into + i, 2);
            memcpy(&b, other + i, 2);
            a = to_bf16(COMBINE(from_bf16(a), from_bf16(b)));
            memcpy(into + i, &a, 2);
        }
        break;
    default: break;
    }
}

/* On the stream, before anything moves: what this rank contributes. */
static void snapshot(struct stream *stream, void *argument) {
    (void)stream;
    struct collective *v = argument;
    uint8_t *from = ppfake_pin(v->device, v->from, v->bytes, "collective");
    if (!from) return;
    memcpy(v->mine, from, v->bytes);
    ppfake_unpin(v->from);
}

static void finish(void *argument, bool complete) {
    struct collective *v = argument;
    uint8_t *to = complete && v->to ? ppfake_pin(v->device, v->to, v->bytes, "collective") : NULL;
    if (to && v->root >= 0) memcpy(to, v->root == v->rank ? v->mine : v->received[v->root], v->bytes);
    if (to && v->root < 0) {
        /* In the order of the ranks, so that every rank rounds alike. */
        memcpy(to, v->rank == 0 ? v->mine : v->received[0], v->bytes);
        for (int r = 1; r < v->ranks; r++)
            fold(to, r == v->rank ? v->mine : v->received[r], v->bytes, v->type, v->operation);
    }
    if (to) ppfake_unpin(v->to);
    for (int r = 0; r < v->ranks; r++) free(v->received[r]);
    free(v->mine);
    free(v);
}

static int operations = 1 << 20; /* apart from those of transfers */

static int issue(const char *name, address from, address to, size_t count, int type, int operation, int root,
                 void *handle, void *stream_handle) {
    struct comm *c;
    ppfake_lock();
    int code = comm_enter(handle, name, &c);
    struct stream *stream = code ? NULL : ppfake_stream(c->device, stream_handle);
    if (!code && (!stream || !type_bytes(type) || operation < 0 || operation > MIN || root >= c->ranks))
        code = NCCL_ARGUMENT;
    uint64_t bytes = count * type_bytes(type);
    if (code || !bytes) return ppfake_unlock(), code;
    struct collective *v = calloc(1, sizeof *v);
    *v = (struct collective){.device = c->device,
                             .type = type,
                             .operation = operation,
                             .ranks = c->ranks,
                             .rank = c->rank,
                             .root = root};
    bool gives = root < 0 || root == c->rank;
    v->from = from, v->to = to, v->bytes = bytes, v->mine = malloc(bytes);
    char reads[64] = "", writes[64] = "";
    if (gives)
        snprintf(reads, sizeof reads, " r=%#llx:%llu", (unsigned long long)from, (unsigned long long)bytes);
    if (to)
        snprintf(writes, sizeof writes, " w=%#llx:%llu", (unsigned long long)to, (unsigned long long)bytes);
    int id = ++operations;
    ppfake_record("%s comm=%d dt=%d len=%llu operation=%d root=%d st=%d depth=%d op=%d%s%s", name, c->id,
                  type, (unsigned long long)bytes, operation, root, ppfake_stream_id(stream), group_depth(),
                  id, reads, writes);
    if (gives) ppfake_enqueue(stream, snapshot, v);
    struct batch *b = group_batch(c, stream);
    batch_name(b, id);
    for (int r = 0; r < c->ranks && !code; r++) {
        if (r == c->rank) continue;
        if (gives)
            code = batch_add(
                b, (struct transfer){
                       .id = id, .sending = true, .peer = r, .type = type, .host = v->mine, .bytes = bytes});
        if (root < 0 || root == r) {
            v->received[r] = malloc(bytes);
            if (!code)
                code = batch_add(
                    b, (struct transfer){
                           .id = id, .peer = r, .type = type, .host = v->received[r], .bytes = bytes});
        }
    }
    batch_then(b, finish, v);
    ppfake_unlock();
    return !code && group_depth() == 0 ? group_close() : code;
}

EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *comm,
                         void *stream) {
    NCCL_FAULT_POINT("ncclAllReduce");
    return issue("ncclAllReduce", (address)(uintptr_t)from, (address)(uintptr_t)to, count, type, operation,
                 -1, comm, stream);
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *comm,
                         void *stream) {
    NCCL_FAULT_POINT("ncclBroadcast");
    if (root < 0) return NCCL_ARGUMENT;
    return issue("ncclBroadcast", (address)(uintptr_t)from, (address)(uintptr_t)to, count, type, SUM, root,
                 comm, stream);
}
