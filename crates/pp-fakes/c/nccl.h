/* What the files of the fake NCCL share. It queues on the fake driver's streams, and moves bytes through a
 * file that the ranks of a communicator map, so ranks may be threads or processes. */
#ifndef PP_FAKE_NCCL_H
#define PP_FAKE_NCCL_H

#include "fake.h"

enum {
    NCCL_OK = 0,
    NCCL_CUDA = 1,
    NCCL_SYSTEM = 2,
    NCCL_INTERNAL = 3,
    NCCL_ARGUMENT = 4,
    NCCL_USAGE = 5,
    NCCL_REMOTE = 6,
    NCCL_IN_PROGRESS = 7,
};

#define MAX_RANKS 8
#define MAX_BATCH 64

EXPORT uint64_t ppfake_setting_number(const char *name, uint64_t otherwise);
EXPORT const char *ppfake_setting(const char *name);
EXPORT void ppfake_hang(void);

/* Like FAULT_POINT, for this library. */
#define NCCL_FAULT_POINT(function)                         \
    do {                                                   \
        struct fault fault_ = ppfake_fault(function);      \
        if (fault_.kind == FAULT_CODE) return fault_.code; \
        if (fault_.kind == FAULT_SKIP) return NCCL_OK;     \
        if (fault_.kind == FAULT_HANG) ppfake_hang();      \
    } while (0)

struct unique_id {
    char bytes[128];
};

/* nccl_wire.c: one byte pipe for each ordered pair of ranks. What fits in a pipe has left the sender,
 * receiver or not: that is the eager limit. */
struct wire;
struct wire *wire_open(const struct unique_id *id, int ranks);
void wire_close(struct wire *wire);
/* True once all ranks have come; false when `stop` became true first. */
int wire_join(struct wire *wire, int rank, const uint8_t uuid[16], const volatile bool *stop);
/* Blocks the host until both ends of a pipe have used it once, as NCCL connects on first use; false when
 * stopped. */
bool wire_connect(struct wire *wire, int from, int to, bool sending, const volatile bool *stop);
uint32_t wire_bell(struct wire *wire, int rank);
void wire_wait(struct wire *wire, int rank, uint32_t seen);
void wire_ring(struct wire *wire, int rank);

/* One end of one transfer; `wire_move` does what can be done now. */
struct transfer {
    int id, self, peer, type;
    bool sending;
    address at;    /* device memory, or 0 */
    uint8_t *host; /* where the bytes are while the transfer runs */
    uint64_t bytes, moved, announced, end;
    enum { AT_HEADER, AT_BODY, AT_END, AT_HANG, DONE } phase;
};
/* True when something moved. */
bool wire_move(struct wire *wire, struct transfer *t);

/* nccl_comm.c */
struct comm {
    uint32_t magic;
    int id, rank, ranks, device;
    bool blocking, ended, finalized, revoked;
    volatile bool stopped; /* aborted or revoked: whatever waits is let go */
    int async;             /* what ncclCommGetAsyncError says */
    int polls;             /* how often it says "in progress" first */
    uint64_t issued, done; /* batches */
    int running;
    struct wire *wire;
    struct transfer *held; /* by the fault `swap` */
    struct stream *held_stream;
    struct unique_id unique;
};
struct comm *comm_of(void *handle);
/* The communicator if calls may be issued on it from this thread, else the code to return. */
int comm_enter(void *handle, const char *function, struct comm **comm);
void comm_stop(struct comm *comm);
void comm_end(struct comm *comm);
void comm_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* nccl_group.c */
int group_depth(void);
struct batch;
/* The open batch of a communicator in this thread's group (an implicit group of one call where none is open).
 */
struct batch *group_batch(struct comm *comm, struct stream *stream);
int batch_add(struct batch *batch, struct transfer transfer);
/* The call that the transfers belong to, for the recording. */
void batch_name(struct batch *batch, int call);
/* What to do on the stream's thread when all transfers are done. */
void batch_then(struct batch *batch, void (*then)(void *argument, bool complete), void *argument);
/* Ends an implicit group. */
int group_close(void);
bool group_add_abort(struct comm *comm);

unsigned type_bytes(int type);

#endif
