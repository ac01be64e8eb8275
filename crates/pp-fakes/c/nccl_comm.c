/* Communicators: birth, death, and what they say of themselves. */
#define _GNU_SOURCE
#include "nccl.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define COMM_MAGIC 0x4E434C43u

struct config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

static int comm_count;
static char last_error[256];

void comm_error(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
}

EXPORT int ncclGetVersion(int *version) {
    NCCL_FAULT_POINT("ncclGetVersion");
    return *version = (int)ppfake_setting_number("NCCL_VERSION", 22809), NCCL_OK;
}

EXPORT int ncclGetUniqueId(struct unique_id *id) {
    NCCL_FAULT_POINT("ncclGetUniqueId");
    uint8_t random[12];
    if (getrandom(random, sizeof random, 0) != sizeof random) return NCCL_SYSTEM;
    memset(id, 0, sizeof *id);
    int n = sprintf(id->bytes, "pp-fake-nccl-");
    for (unsigned i = 0; i < sizeof random; i++) n += sprintf(id->bytes + n, "%02x", random[i]);
    return NCCL_OK;
}

struct comm *comm_of(void *handle) {
    struct comm *c = handle;
    return c && c->magic == COMM_MAGIC && !c->ended ? c : NULL;
}

int comm_enter(void *handle, const char *function, struct comm **comm) {
    struct comm *c = *comm = comm_of(handle);
    if (!c) {
        comm_error("%s: the communicator does not exist any more", function);
        ppfake_record("Fault what=dead_communicator who=%s", function);
        return NCCL_ARGUMENT;
    }
    if (c->revoked || c->finalized) {
        comm_error("%s: the communicator was %s", function, c->revoked ? "revoked" : "finalized");
        return NCCL_USAGE;
    }
    if (c->async != NCCL_OK) {
        comm_error("%s: the communicator is busy or has failed (%d)", function, c->async);
        return c->async == NCCL_IN_PROGRESS ? NCCL_ARGUMENT : c->async;
    }
    /* The real one changes the thread's device for the length of the call; a caller that counts on it issues
     * its events somewhere else. */
    if (ppfake_current_device() != c->device) {
        comm_error("%s: device %d is current, not %d of the communicator", function, ppfake_current_device(),
                   c->device);
        ppfake_record("Fault what=unbound who=%s dev=%d", function, c->device);
        return NCCL_CUDA;
    }
    return NCCL_OK;
}

/* Under the lock: no operation holds the communicator's memory any more. */
static void close_if_idle(struct comm *c) {
    if (c->ended && c->done == c->issued && !c->running && c->wire) {
        wire_close(c->wire);
        c->wire = NULL;
    }
}

static int join(struct comm *c) {
    uint8_t uuid[16];
    ppfake_uuid(c->device, uuid);
    int code = wire_join(c->wire, c->rank, uuid, &c->stopped);
    ppfake_lock();
    ppfake_record("ncclCommInit comm=%d phase=end rc=%d", c->id, code);
    ppfake_unlock();
    return code;
}

static void *join_later(void *argument) {
    struct comm *c = argument;
    int code = join(c);
    ppfake_lock();
    c->async = code;
    c->running--;
    close_if_idle(c);
    ppfake_changed();
    ppfake_unlock();
    return NULL;
}

static int init(void **handle, int ranks, struct unique_id id, int rank, bool blocking) {
    *handle = NULL;
    if (ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks ||
        strncmp(id.bytes, "pp-fake-nccl-", 13) != 0) {
        comm_error("rank %d of %d, or a unique id that was not made by this library", rank, ranks);
        return NCCL_ARGUMENT;
    }
    if (ppfake_current_device() < 0) {
        comm_error("no device is current");
        return NCCL_CUDA;
    }
    struct comm *c = calloc(1, sizeof *c);
    *c = (struct comm){.magic = COMM_MAGIC,
                       .rank = rank,
                       .ranks = ranks,
                       .device = ppfake_current_device(),
                       .blocking = blocking,
                       .unique = id};
    if (!(c->wire = wire_open(&id, ranks))) return free(c), NCCL_SYSTEM;
    ppfake_lock();
    c->id = ++comm_count;
    ppfake_record("ncclCommInit comm=%d phase=begin uid=%.40s rank=%d ranks=%d dev=%d blocking=%d", c->id,
                  id.bytes, rank, ranks, c->device, blocking);
    ppfake_unlock();
    if (blocking) {
        int code = join(c);
        if (code) return wire_close(c->wire), free(c), code;
        return *handle = c, NCCL_OK;
    }
    c->async = NCCL_IN_PROGRESS;
    c->running = 1;
    pthread_t thread;
    if (pthread_create(&thread, NULL, join_later, c) != 0) return NCCL_SYSTEM;
    pthread_detach(thread);
    return *handle = c, NCCL_IN_PROGRESS;
}

EXPORT int ncclCommInitRank(void **handle, int ranks, struct unique_id id, int rank) {
    NCCL_FAULT_POINT("ncclCommInitRank");
    return init(handle, ranks, id, rank, true);
}
EXPORT int ncclCommInitRankConfig(void **handle, int ranks, struct unique_id id, int rank,
                                  const struct config *config) {
    NCCL_FAULT_POINT("ncclCommInitRankConfig");
    if (config && config->magic != 0xcafebeef)
        return comm_error("the configuration was not initialized"), NCCL_ARGUMENT;
    return init(handle, ranks, id, rank, !config || config->blocking != 0);
}

EXPORT int ncclCommGetAsyncError(void *handle, int *error) {
    NCCL_FAULT_POINT("ncclCommGetAsyncError");
    struct fault injected = ppfake_fault("asyncError");
    ppfake_lock();
    struct comm *c = comm_of(handle);
    if (c && injected.kind == FAULT_CODE) c->async = injected.code;
    if (c) *error = c->async;
    if (c && c->async == NCCL_OK && c->polls > 0) c->polls--, *error = NCCL_IN_PROGRESS;
    ppfake_unlock();
    return c ? NCCL_OK : NCCL_ARGUMENT;
}

EXPORT const char *ncclGetErrorString(int code) {
    static const char *const text[] = {
        "no error",
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "internal error - please report this issue to the NCCL developers",
        "invalid argument (run with NCCL_DEBUG=WARN for details)",
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
    };
    return code >= 0 && code <= NCCL_IN_PROGRESS ? text[code] : "unknown result code";
}
EXPORT const char *ncclGetLastError(void *handle) { return (void)handle, last_error; }

void comm_end(struct comm *c) { close_if_idle(c); }

/* Lets everything that waits in this communicator go; its streams go on and report success, as the real ones
 * do. */
void comm_stop(struct comm *c) {
    c->stopped = true;
    if (c->wire) wire_ring(c->wire, c->rank);
    ppfake_changed();
}

EXPORT int ncclCommFinalize(void *handle) {
    NCCL_FAULT_POINT("ncclCommFinalize");
    ppfake_lock();
    struct comm *c = comm_of(handle);
    if (c) {
        ppfake_record("ncclCommFinalize comm=%d", c->id);
        while (c->done < c->issued && !c->stopped && c->blocking) ppfake_wait();
        c->finalized = true;
        c->polls = c->blocking ? 0 : 2;
    }
    ppfake_unlock();
    return !c ? NCCL_ARGUMENT : c->blocking ? NCCL_OK : NCCL_IN_PROGRESS;
}

EXPORT int ncclCommDestroy(void *handle) {
    NCCL_FAULT_POINT("ncclCommDestroy");
    ppfake_lock();
    struct comm *c = comm_of(handle);
    if (c) {
        ppfake_record("ncclCommDestroy comm=%d phase=begin", c->id);
        while (c->done < c->issued && !c->stopped) ppfake_wait();
        ppfake_record("ncclCommDestroy comm=%d phase=end", c->id);
        c->ended = true;
        close_if_idle(c);
    }
    ppfake_unlock();
    return c ? NCCL_OK : NCCL_ARGUMENT;
}

EXPORT int ncclCommAbort(void *handle) {
    NCCL_FAULT_POINT("ncclCommAbort");
    ppfake_lock();
    struct comm *c = comm_of(handle);
    if (c) ppfake_record("ncclCommAbort comm=%d depth=%d", c->id, group_depth());
    if (c && !group_add_abort(c)) {
        comm_stop(c);
        while (c->running) ppfake_wait();
        c->ended = true;
        close_if_idle(c);
    }
    ppfake_unlock();
    if (c && group_depth() == 0) usleep((useconds_t)(1000 * ppfake_setting_number("NCCL_ABORT_MS", 20)));
    return c ? NCCL_OK : NCCL_ARGUMENT;
}

#ifndef PP_FAKE_NO_REVOKE
EXPORT int ncclCommRevoke(void *handle, int flags) {
    NCCL_FAULT_POINT("ncclCommRevoke");
    if (flags) return NCCL_ARGUMENT;
    ppfake_lock();
    struct comm *c = comm_of(handle);
    if (c) {
        ppfake_record("ncclCommRevoke comm=%d", c->id);
        c->revoked = true;
        comm_stop(c);
    }
    ppfake_unlock();
    return c ? NCCL_OK : NCCL_ARGUMENT;
}
#endif

EXPORT int ncclCommRegister(void *handle, void *at, size_t bytes, void **registration) {
    (void)at, (void)bytes;
    return comm_of(handle) ? (*registration = handle, NCCL_OK) : NCCL_ARGUMENT;
}
EXPORT int ncclCommDeregister(void *handle, void *registration) {
    return comm_of(handle) && registration ? NCCL_OK : NCCL_ARGUMENT;
}
