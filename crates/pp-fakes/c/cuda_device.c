/* Devices, primary contexts, and what a thread has made current. */
#include "memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONTEXT_MAGIC 0xC0817E87u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static bool initialized;
static struct context contexts[MAX_DEVICES];
static __thread struct context *current;

void ppfake_lock(void) { pthread_mutex_lock(&lock); }
void ppfake_unlock(void) { pthread_mutex_unlock(&lock); }
void ppfake_wait(void) { pthread_cond_wait(&change, &lock); }
void ppfake_changed(void) { pthread_cond_broadcast(&change); }

/* The physical device behind an ordinal: CUDA_VISIBLE_DEVICES with plain numbers is honoured, unless the driver is to
   open other devices than those (IGNORE_VISIBLE). */
static int physical(int ordinal) {
    int all = (int)fake_setting_number("DEVICES", 2), seen = 0;
    if (all > MAX_DEVICES) all = MAX_DEVICES;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible || fake_setting_number("IGNORE_VISIBLE", 0)) return ordinal < all ? ordinal : -1;
    char copy[128], *rest = copy, *item;
    snprintf(copy, sizeof copy, "%s", visible);
    while ((item = strsep(&rest, ","))) {
        char *end;
        long device = strtol(item, &end, 10);
        if (end == item || device < 0 || device >= all) break;
        if (seen++ == ordinal) return (int)device;
    }
    return -1;
}

int fake_physical_device(int device) { return physical(device); }

int fake_visible_device(int wanted) {
    int device = fake_device_count() - 1;
    while (device >= 0 && physical(device) != wanted) device--;
    return device;
}

int fake_device_count(void) {
    int n = 0;
    while (n < MAX_DEVICES && physical(n) >= 0) n++;
    return n;
}

void ppfake_uuid(int device, uint8_t uuid[16]) {
    memcpy(uuid, "pp fake GPU \0\0\0\0", 16);
    uuid[15] = (uint8_t)(physical(device) + 1);
}

struct context *fake_context_of(int device) {
    return device >= 0 && device < MAX_DEVICES && contexts[device].magic == CONTEXT_MAGIC ? &contexts[device]
                                                                                          : NULL;
}

int fake_current(struct context **context) {
    if (!initialized) return NOT_INITIALIZED;
    if (!current || current->references == 0) return INVALID_CONTEXT;
    *context = current;
    return current->sticky;
}

int ppfake_current_device(void) { return current && current->references ? current->device : -1; }

void fake_poison(int device, int code) {
    struct context *context = fake_context_of(device);
    if (context && !context->sticky) context->sticky = code;
}

int fake_fail(int code) {
    if (code >= 700 && code < 720) fake_poison(ppfake_current_device(), code);
    return code;
}

EXPORT int cuInit(unsigned flags) {
    FAULT_POINT("cuInit");
    if (flags) return INVALID_VALUE;
    if (fake_device_count() == 0) return NO_DEVICE;
    initialized = true;
    return OK;
}

EXPORT int cuDriverGetVersion(int *version) {
    FAULT_POINT("cuDriverGetVersion");
    *version = (int)fake_setting_number("DRIVER", 13000);
    return OK;
}

EXPORT int cuDeviceGetCount(int *count) {
    FAULT_POINT("cuDeviceGetCount");
    if (!initialized) return NOT_INITIALIZED;
    *count = fake_device_count();
    return OK;
}

int fake_check_device(int device) {
    return !initialized ? NOT_INITIALIZED : device < 0 || device >= fake_device_count() ? INVALID_DEVICE : OK;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    FAULT_POINT("cuDeviceGet");
    *device = ordinal;
    return fake_check_device(ordinal);
}

EXPORT int cuDeviceGetName(char *name, int length, int device) {
    if (fake_check_device(device)) return fake_check_device(device);
    snprintf(name, (size_t)length, "PP Fake GPU %d", physical(device));
    return OK;
}

EXPORT int cuDeviceGetUuid_v2(void *uuid, int device) {
    if (fake_check_device(device)) return fake_check_device(device);
    ppfake_uuid(device, uuid);
    return OK;
}
EXPORT int cuDeviceGetUuid(void *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

EXPORT int cuDeviceGetPCIBusId(char *text, int length, int device) {
    if (fake_check_device(device)) return fake_check_device(device);
    snprintf(text, (size_t)length, "0000:%02x:00.0", 0x10 + physical(device));
    return OK;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    if (fake_check_device(device)) return fake_check_device(device);
    *bytes = fake_setting_number("MEMORY", 1u << 30);
    return OK;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (fake_check_device(device)) return fake_check_device(device);
    switch (attribute) {
    case 1:
    case 2:
    case 3: *value = 1024; break;       /* threads per block; block x, y */
    case 4: *value = 64; break;         /* block z */
    case 5: *value = 0x7fffffff; break; /* grid x */
    case 6:
    case 7: *value = 65535; break;                    /* grid y, z */
    case 8: *value = 49152; break;                    /* shared memory per block */
    case 10: *value = 32; break;                      /* warp */
    case 12: *value = 65536; break;                   /* registers per block */
    case 13: *value = 1980000; break;                 /* clock, kHz */
    case 16: *value = 132; break;                     /* multiprocessors */
    case 33: *value = 0x10 + physical(device); break; /* PCI bus */
    case 36: *value = 3201000; break;                 /* memory clock, kHz */
    case 37: *value = 6144; break;                    /* memory bus, bits */
    case 38: *value = 60 << 20; break;                /* L2 */
    case 39: *value = 2048; break;                    /* threads per multiprocessor */
    case 40: *value = 3; break;                       /* copy engines */
    case 31:
    case 41:
    case 78:
    case 79:
    case 95:
    case 115: *value = 1; break; /* concurrent kernels, unified addressing, priorities, cooperative, pools */
    case 92:
    case 93:
    case 99:
    case 102: *value = 1; break; /* memory operations of streams, also of 64 bits; registered memory; mapping */
    case 103: *value = fake_setting_number("DESCRIPTORS", 1) != 0; break; /* memory by a descriptor */
    case 133: *value = fake_setting_number("MPS", 0) != 0; break;
    case 75: *value = 9; break;  /* compute capability */
    case 76: *value = 0; break;
    case 81: *value = 233472; break; /* shared memory per multiprocessor */
    case 82: *value = 65536; break;
    case 97: *value = 232448; break; /* shared memory per block, opted in */
    default: *value = 0;
    }
    return OK;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    FAULT_POINT("cuDevicePrimaryCtxRetain");
    if (fake_check_device(device)) return fake_check_device(device);
    ppfake_lock();
    struct context *c = &contexts[device];
    c->magic = CONTEXT_MAGIC;
    c->device = device;
    c->references++;
    ppfake_record("cuDevicePrimaryCtxRetain dev=%d", device);
    ppfake_unlock();
    *context = c;
    return OK;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    if (fake_check_device(device)) return fake_check_device(device);
    ppfake_lock();
    int code = contexts[device].references > 0 ? OK : INVALID_CONTEXT;
    if (!code) contexts[device].references--;
    ppfake_record("cuDevicePrimaryCtxRelease dev=%d rc=%d", device, code);
    ppfake_unlock();
    return code;
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (fake_check_device(device)) return fake_check_device(device);
    *flags = 0;
    *active = contexts[device].references > 0;
    return OK;
}
EXPORT int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return (void)flags, fake_check_device(device); }

EXPORT int cuCtxSetCurrent(void *context) {
    FAULT_POINT("cuCtxSetCurrent");
    if (!initialized) return NOT_INITIALIZED;
    struct context *c = context;
    if (c && c->magic != CONTEXT_MAGIC) return INVALID_CONTEXT;
    current = c;
    ppfake_lock();
    ppfake_record("cuCtxSetCurrent dev=%d", c ? c->device : -1);
    ppfake_unlock();
    return OK;
}

EXPORT int cuCtxGetCurrent(void **context) {
    if (!initialized) return NOT_INITIALIZED;
    *context = current;
    return OK;
}
EXPORT int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
EXPORT int cuCtxPopCurrent_v2(void **context) {
    if (context) *context = current;
    return cuCtxSetCurrent(NULL);
}

EXPORT int cuCtxGetId(void *context, unsigned long long *id) {
    struct context *c = context;
    if (!c || c->magic != CONTEXT_MAGIC) return INVALID_CONTEXT;
    *id = (unsigned long long)c->device + 1;
    return OK;
}

EXPORT int cuCtxGetDevice(int *device) {
    struct context *c;
    int code = fake_current(&c);
    if (!code) *device = c->device;
    return code;
}
EXPORT int cuCtxGetFlags(unsigned *flags) { return *flags = 0, OK; }
EXPORT int cuCtxSetFlags(unsigned flags) { return (void)flags, OK; }
EXPORT int cuCtxGetLimit(size_t *value, int limit) { return (void)limit, *value = 0, OK; }
EXPORT int cuCtxSetLimit(int limit, size_t value) { return (void)limit, (void)value, OK; }
EXPORT int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }
EXPORT int cuCtxGetApiVersion(void *context, unsigned *version) {
    return (void)context, *version = 13000, OK;
}

EXPORT int cuCtxSynchronize(void) {
    FAULT_POINT("cuCtxSynchronize");
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    if (!code) {
        ppfake_record("cuCtxSynchronize dev=%d phase=begin", c->device);
        fake_wait_device(c->device);
        code = c->sticky;
        ppfake_record("cuCtxSynchronize dev=%d phase=end rc=%d", c->device, code);
    }
    ppfake_unlock();
    return code;
}

enum peers fake_peers(void) {
    const char *set = fake_setting("PEERS");
    return !set || strcmp(set, "nvlink") == 0 ? BY_NVLINK : strcmp(set, "pcie") == 0 ? BY_PCIE : NO_PEERS;
}

EXPORT int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    FAULT_POINT("cuDeviceCanAccessPeer");
    if (fake_check_device(device) || fake_check_device(peer)) return INVALID_DEVICE;
    *can = device != peer && fake_peers() != NO_PEERS;
    return OK;
}

EXPORT int cuDeviceGetP2PAttribute(int *value, unsigned attribute, int device, int peer) {
    FAULT_POINT("cuDeviceGetP2PAttribute");
    if (fake_check_device(device) || fake_check_device(peer) || device == peer) return INVALID_DEVICE;
    switch (attribute) {
    case 1: *value = fake_peers() == BY_PCIE; break; /* rank of speed */
    case 2:
    case 4: *value = fake_peers() != NO_PEERS; break;  /* access; of arrays too */
    case 3: *value = fake_peers() == BY_NVLINK; break; /* atomics */
    default: return INVALID_VALUE;
    }
    return OK;
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {UNSUPPORTED_PTX, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM",
     "OS call failed or operation not supported on this OS"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

EXPORT int cuGetErrorName(int code, const char **name) {
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *name = errors[i].name, OK;
    return *name = NULL, INVALID_VALUE;
}
EXPORT int cuGetErrorString(int code, const char **text) {
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *text = errors[i].text, OK;
    return *text = NULL, INVALID_VALUE;
}
