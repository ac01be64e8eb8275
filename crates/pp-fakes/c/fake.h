/* What the files of the fake driver (and the fake NCCL on top of it) share.
 *
 * The fake driver runs every stream on a thread of its own, keeps "device" memory where the host cannot touch
 * it, and writes one line for every call that matters to order or lifetime. What it promises is less than a
 * GPU promises, never more: nothing that real hardware leaves unordered is ordered here. */
#ifndef PP_FAKE_H
#define PP_FAKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef uint64_t address;

/* Numbers of two bytes. */
static inline float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The driver's result codes that the fake uses. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_PTX = 218,
    UNSUPPORTED_PTX = 222,
    FILE_NOT_FOUND = 301,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
};

/* settings.c: what a test asks for, from the environment or from ppfake_set. */
const char *fake_setting(const char *name);
uint64_t fake_setting_number(const char *name, uint64_t otherwise);

/* faults.c: what a test wants to go wrong at the k-th call of a function. */
enum fault_kind {
    FAULT_NONE,
    FAULT_CODE,
    FAULT_SKIP,
    FAULT_HANG,
    FAULT_HALF,
    FAULT_THREAD,
    FAULT_FREE,
    FAULT_SWAP,
    FAULT_SYNC,
    FAULT_WAIT,
    FAULT_FLIP,
    FAULT_EARLY,
    FAULT_OTHER
};
struct fault {
    enum fault_kind kind;
    int code;
};
EXPORT struct fault ppfake_fault(const char *function);
/* Returns from the calling function where a test wants its k-th call to fail, to hang or to do nothing. */
#define FAULT_POINT(function)                         \
    do {                                              \
        struct fault fault_ = ppfake_fault(function); \
        FAULT_TAKES(fault_);                          \
    } while (0)
#define FAULT_TAKES(fault)                                   \
    do {                                                     \
        if ((fault).kind == FAULT_CODE) return fake_fail((fault).code); \
        if ((fault).kind == FAULT_SKIP) return OK;           \
        if ((fault).kind == FAULT_HANG) fake_hang();         \
    } while (0)
void fake_hang(void);
void fake_wait_at_gate(void);

/* record.c: one line per call: sequence number, thread, nanoseconds, name, fields. */
EXPORT void ppfake_record(const char *format, ...) __attribute__((format(printf, 1, 2)));
EXPORT void ppfake_worker_thread(void);
/* The number of the calling thread in the recording; and what a thread that acts for another one calls first. */
EXPORT int ppfake_thread(void);
EXPORT void ppfake_act_for(int thread);
EXPORT uint64_t ppfake_now(void);

/* The one lock over all state of both fakes. Recording and queueing happen under it together, so the order of
 * lines is the order of effects. */
EXPORT void ppfake_lock(void);
EXPORT void ppfake_unlock(void);
/* Waits for any change; the lock is released meanwhile. */
EXPORT void ppfake_wait(void);
EXPORT void ppfake_changed(void);

/* cuda_device.c */
#define MAX_DEVICES 8
struct context {
    uint32_t magic;
    int device, references;
    int sticky; /* the error every call returns once the device has faulted */
    struct stream *legacy;
};
int fake_device_count(void);
EXPORT void ppfake_uuid(int device, uint8_t uuid[16]);
struct context *fake_context_of(int device);
/* How two GPUs of the host reach each other. */
enum peers { NO_PEERS, BY_PCIE, BY_NVLINK };
enum peers fake_peers(void);
EXPORT int ppfake_current_device(void); /* -1: no context is current on this thread */
/* The current context, or the code to return: the first test of nearly every call. */
int fake_current(struct context **context);
void fake_poison(int device, int code);
int fake_fail(int code); /* gives the code; a fault of a kernel stays with the context */

/* cuda_memory.c */
struct range {
    address at;
    uint64_t bytes;
};
/* Host pointer to device or pinned memory for as long as it is pinned; NULL (and a recorded fault) where [at,
 * at+bytes) is not one live allocation that `device` may touch. */
EXPORT uint8_t *ppfake_pin(int device, address at, uint64_t bytes, const char *who);
EXPORT void ppfake_unpin(address at);
EXPORT bool ppfake_is_device(address at);
/* Frees the allocation that holds the address, even while it is used. */
EXPORT void ppfake_free_under(address at);

/* cuda_stream.c */
struct stream {
    uint32_t magic;
    int id, device;
    unsigned flags;
    bool closing;
    uint64_t queued, finished; /* operations so far */
    uint64_t random;
    struct op *head, *tail;
    struct stream *next;
};
typedef void (*op_run)(struct stream *stream, void *argument);
/* The stream behind a handle, or NULL. Handle 0 is the context's legacy stream. */
struct stream *fake_stream(struct context *context, void *handle);
EXPORT struct stream *ppfake_stream(int device, void *handle);
EXPORT int ppfake_stream_id(struct stream *stream);
/* Under the lock. `run` is called on the stream's thread, without the lock; it frees its argument. */
EXPORT void ppfake_enqueue(struct stream *stream, op_run run, void *argument);
/* A random pause on the stream's thread. */
EXPORT void ppfake_pause(struct stream *stream);
uint64_t fake_random(uint64_t *state);
void fake_wait_stream(struct stream *stream, uint64_t operations);
void fake_wait_device(int device);

/* cuda_event.c: one recording of an event; waits hold the recording, not the event. */
struct mark {
    int references;
    bool done;
    uint64_t ns;
};
EXPORT struct mark *ppfake_mark_new(void);
EXPORT void ppfake_mark_release(struct mark *mark);
/* Queues "reached" and "wait for" on a stream, under the lock. */
EXPORT void ppfake_mark_record(struct stream *stream, struct mark *mark);
EXPORT void ppfake_mark_wait(struct stream *stream, struct mark *mark);

/* kernels.c: what a kernel reads, writes and does, by name. */
#define MAX_RANGES 18
struct launch {
    int device;
    struct stream *stream;
    unsigned grid[3], block[3], shared;
    unsigned count;         /* of parameters */
    uint64_t parameter[32]; /* their first eight bytes, or the offset in `bytes` where larger */
    unsigned size[32];
    uint8_t bytes[4096];
    struct range reads[MAX_RANGES], writes[MAX_RANGES];
    unsigned read_count, write_count;
};
struct kernel {
    const char *name;
    unsigned parameters;
    void (*touches)(struct launch *launch); /* fills reads and writes */
    void (*run)(struct launch *launch);
};
const struct kernel *fake_kernel(const char *name);

#endif
