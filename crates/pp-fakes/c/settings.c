/* Settings: PP_FAKE_* of the environment, overridden by ppfake_set inside a test process. */
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char name[48];
    char value[512];
} overrides[64];
static unsigned override_count;

/* Sets `name` (without PP_FAKE_) for this process; takes effect for what looks it up afterwards. */
EXPORT int ppfake_set(const char *name, const char *value) {
    pthread_mutex_lock(&guard);
    unsigned i = 0;
    while (i < override_count && strcmp(overrides[i].name, name) != 0) i++;
    int full = i == sizeof overrides / sizeof *overrides;
    if (!full) {
        snprintf(overrides[i].name, sizeof overrides[i].name, "%s", name);
        snprintf(overrides[i].value, sizeof overrides[i].value, "%s", value);
        if (i == override_count) override_count++;
    }
    pthread_mutex_unlock(&guard);
    return full ? OUT_OF_MEMORY : OK;
}

/* Valid until this thread looks up a setting again. */
const char *fake_setting(const char *name) {
    static _Thread_local char value[sizeof overrides->value];
    const char *found = NULL;
    pthread_mutex_lock(&guard);
    for (unsigned i = 0; i < override_count; i++)
        if (strcmp(overrides[i].name, name) == 0) found = strcpy(value, overrides[i].value);
    pthread_mutex_unlock(&guard);
    if (found) return found;
    char variable[64];
    snprintf(variable, sizeof variable, "PP_FAKE_%s", name);
    return getenv(variable);
}

uint64_t fake_setting_number(const char *name, uint64_t otherwise) {
    const char *text = fake_setting(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

/* For the fake NCCL, which is another library. */
EXPORT const char *ppfake_setting(const char *name) { return fake_setting(name); }
EXPORT uint64_t ppfake_setting_number(const char *name, uint64_t otherwise) {
    return fake_setting_number(name, otherwise);
}
