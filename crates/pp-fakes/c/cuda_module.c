/* Modules and launches. A module is a PTX text; what an entry does is looked up by its name among the kernels
 * that the fake knows. */
#define _GNU_SOURCE
#include "fake.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FUNCTION_MAGIC 0xF0CC10u

struct function {
    uint32_t magic;
    char name[256];
    const struct kernel *kernel;
    unsigned count, size[32];
    struct function *next;
};
struct module {
    struct function *functions;
};

/* Bytes of one `.param` declaration. */
static unsigned parameter_bytes(const char *text, const char *end) {
    const char *array = memchr(text, '[', (size_t)(end - text));
    unsigned unit = 0;
    for (const char *p = text; p + 4 < end; p++)
        if (p[0] == '.' && strchr("ubsf", p[1]) && isdigit((unsigned char)p[2]))
            unit = (unsigned)atoi(p + 2) / 8;
    return array ? (unsigned)atoi(array + 1) * unit : unit;
}

static void parse(struct module *module, const char *text) {
    for (const char *at = text; (at = strstr(at, ".entry "));) {
        struct function *f = calloc(1, sizeof *f);
        f->magic = FUNCTION_MAGIC;
        sscanf(at + 7, " %255[A-Za-z0-9_$]", f->name);
        const char *open = strchr(at, '('), *body = strchr(at, '{');
        if (open && body && open < body) {
            const char *close = strchr(open, ')');
            for (const char *p = open; close && (p = strstr(p, ".param")) && p < close;) {
                const char *end = p + 6;
                while (end < close && *end != ',') end++;
                if (f->count < 32) f->size[f->count++] = parameter_bytes(p, end);
                p = end;
            }
        }
        f->kernel = fake_kernel(f->name);
        f->next = module->functions;
        module->functions = f;
        at += 7;
    }
}

EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned options, int *names, void **values) {
    FAULT_POINT("cuModuleLoadData");
    (void)options, (void)names, (void)values;
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    if (!code && !strstr(image, ".entry "))
        code = INVALID_PTX; /* a cubin or a fatbin: nothing here can read it */
    if (!code) {
        struct module *m = calloc(1, sizeof *m);
        parse(m, image);
        ppfake_record("cuModuleLoadData dev=%d", c->device);
        *module = m;
    }
    ppfake_unlock();
    return code;
}
EXPORT int cuModuleLoadData(void **module, const void *image) {
    return cuModuleLoadDataEx(module, image, 0, NULL, NULL);
}
EXPORT int cuModuleUnload(void *module) {
    ppfake_lock();
    ppfake_record("cuModuleUnload");
    ppfake_unlock();
    return module ? OK : INVALID_HANDLE;
}

EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
    FAULT_POINT("cuModuleGetFunction");
    for (struct function *f = ((struct module *)module)->functions; f; f = f->next)
        if (strcmp(f->name, name) == 0) return *function = f, OK;
    return NOT_FOUND;
}

EXPORT int cuFuncSetAttribute(void *function, int attribute, int value) {
    return (void)function, (void)attribute, (void)value, OK;
}
EXPORT int cuFuncSetCacheConfig(void *function, int config) { return (void)function, (void)config, OK; }
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads per block; registers */
    return OK;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads,
                                                       size_t shared) {
    (void)function, (void)shared;
    *blocks = threads > 0 && threads <= 1024 ? 2048 / threads : 0;
    return OK;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, void *function, int threads,
                                                                size_t shared, unsigned flags) {
    return (void)flags, cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

static void run(struct stream *s, void *argument) {
    (void)s;
    struct launch *l = argument;
    const struct kernel *kernel;
    memcpy(&kernel, l->bytes + sizeof l->bytes - sizeof kernel, sizeof kernel);
    kernel->run(l);
    free(l);
}

static int list(char *text, size_t room, const char *key, const struct range *ranges, unsigned count) {
    int n = 0;
    for (unsigned i = 0; i < count; i++)
        n += snprintf(text + n, room - (size_t)n, "%s%#llx:%llu", i ? "," : key,
                      (unsigned long long)ranges[i].at, (unsigned long long)ranges[i].bytes);
    return n;
}

static int launch(struct function *f, const unsigned grid[3], const unsigned block[3], unsigned shared,
                  void *handle, void **parameters) {
    struct context *c;
    ppfake_lock();
    int code = fake_current(&c);
    struct stream *s = code ? NULL : fake_stream(c, handle);
    if (!code && (!s || !f || f->magic != FUNCTION_MAGIC)) code = INVALID_HANDLE;
    if (!code && (!grid[0] || !grid[1] || !grid[2] || block[0] * block[1] * block[2] - 1 >= 1024))
        code = INVALID_VALUE;
    if (!code && !f->kernel) {
        ppfake_record("Fault what=unknown_kernel name=%s", f->name);
        code = NOT_SUPPORTED; /* it loads, so that a run may load what it does not need */
    }
    if (!code && f->count != f->kernel->parameters) code = INVALID_VALUE;
    if (!code) {
        struct launch *l = calloc(1, sizeof *l);
        l->device = c->device, l->stream = s, l->shared = shared, l->count = f->count;
        memcpy(l->grid, grid, sizeof l->grid);
        memcpy(l->block, block, sizeof l->block);
        unsigned used = 0;
        for (unsigned i = 0; i < f->count; i++) {
            l->size[i] = f->size[i];
            if (f->size[i] <= 8) memcpy(&l->parameter[i], parameters[i], f->size[i]);
            else if (used + f->size[i] <= sizeof l->bytes - 8) {
                memcpy(l->bytes + used, parameters[i], f->size[i]);
                l->parameter[i] = used;
                used += f->size[i];
            }
        }
        memcpy(l->bytes + sizeof l->bytes - sizeof f->kernel, &f->kernel, sizeof f->kernel);
        f->kernel->touches(l);
        char reads[512] = "", writes[512] = "";
        list(reads, sizeof reads, " r=", l->reads, l->read_count);
        list(writes, sizeof writes, " w=", l->writes, l->write_count);
        ppfake_record("cuLaunchKernel st=%d fn=%s grid=%u,%u,%u block=%u%s%s", s->id, f->name, grid[0],
                      grid[1], grid[2], block[0], reads, writes);
        ppfake_enqueue(s, run, l);
    }
    ppfake_unlock();
    return code;
}

EXPORT int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
    FAULT_POINT("cuLaunchKernel");
    if (extra) return NOT_SUPPORTED;
    return launch(f, (unsigned[3]){gx, gy, gz}, (unsigned[3]){bx, by, bz}, shared, stream, parameters);
}
