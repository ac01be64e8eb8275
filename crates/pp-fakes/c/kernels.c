/* The kernels that the fake knows, by the name of their entry. Those of the tests are here; those of
 * pp-kernels in kernels_video.c, kernels_phase_b.c and kernels_digest.c. */
#include "kernels.h"

#include <string.h>
#include <unistd.h>

void fake_reads(struct launch *l, address at, uint64_t bytes) {
    if (bytes && l->read_count < MAX_RANGES) l->reads[l->read_count++] = (struct range){at, bytes};
}
void fake_writes(struct launch *l, address at, uint64_t bytes) {
    if (bytes && l->write_count < MAX_RANGES) l->writes[l->write_count++] = (struct range){at, bytes};
}

bool fake_pin_all(struct launch *l, const char *who, uint8_t **reads, uint8_t **writes) {
    for (unsigned i = 0; i < l->read_count + l->write_count; i++) {
        bool is_read = i < l->read_count;
        struct range range = is_read ? l->reads[i] : l->writes[i - l->read_count];
        uint8_t *at = ppfake_pin(l->device, range.at, range.bytes, who);
        *(is_read ? &reads[i] : &writes[i - l->read_count]) = at;
        if (at) continue;
        while (i-- > 0) ppfake_unpin(i < l->read_count ? l->reads[i].at : l->writes[i - l->read_count].at);
        return false;
    }
    return true;
}
void fake_unpin_all(struct launch *l) {
    for (unsigned i = 0; i < l->read_count; i++) ppfake_unpin(l->reads[i].at);
    for (unsigned i = 0; i < l->write_count; i++) ppfake_unpin(l->writes[i].at);
}

/* Byte i of payload n: any mix-up of payloads or offsets shows. The same as `pattern` of the conformance
 * suite. */
static uint8_t pattern(uint64_t n, uint64_t i) { return (uint8_t)(n * 31 ^ i ^ i >> 8 ^ i >> 16); }

/* pp_fake_fill(to, bytes, n): writes payload n. */
static void fill_touches(struct launch *l) { fake_writes(l, l->parameter[0], l->parameter[1]); }
static void fill_run(struct launch *l) {
    TOUCH("pp_fake_fill")
    uint64_t bytes = l->parameter[1];
    for (uint64_t i = 0; i < bytes; i++) {
        if (i == bytes / 2) ppfake_pause(l->stream);
        writes[0][i] = pattern(l->parameter[2], i);
    }
    fake_unpin_all(l);
}

/* pp_fake_check(from, bytes, n, wrong): adds to the u64 at `wrong` how many bytes are not those of payload n.
 */
static void check_touches(struct launch *l) {
    fake_reads(l, l->parameter[0], l->parameter[1]);
    fake_writes(l, l->parameter[3], 8);
}
static void check_run(struct launch *l) {
    TOUCH("pp_fake_check")
    uint64_t bytes = l->parameter[1], bad = 0, sum;
    for (uint64_t i = 0; i < bytes; i++) {
        if (i == bytes / 2) ppfake_pause(l->stream);
        bad += reads[0][i] != pattern(l->parameter[2], i);
    }
    memcpy(&sum, writes[0], 8);
    sum += bad;
    memcpy(writes[0], &sum, 8);
    fake_unpin_all(l);
}

/* pp_fake_copy(to, from, bytes): copies a payload, as a stage would transform one. */
static void copy_touches(struct launch *l) {
    fake_reads(l, l->parameter[1], l->parameter[2]);
    fake_writes(l, l->parameter[0], l->parameter[2]);
}
static void copy_run(struct launch *l) {
    TOUCH("pp_fake_copy")
    uint64_t bytes = l->parameter[2];
    if (bytes) {
        memcpy(writes[0], reads[0], bytes / 2);
        ppfake_pause(l->stream);
        memcpy(writes[0] + bytes / 2, reads[0] + bytes / 2, bytes - bytes / 2);
    }
    fake_unpin_all(l);
}

/* pp_fake_spin(microseconds): the largest number waits at the gate of faults.c. */
static void no_touches(struct launch *l) { (void)l; }
static void spin_run(struct launch *l) {
    if (l->parameter[0] == UINT64_MAX) fake_wait_at_gate();
    else usleep((useconds_t)l->parameter[0]);
}

static const struct kernel test_kernels[] = {
    {"pp_fake_fill", 3, fill_touches, fill_run},
    {"pp_fake_check", 4, check_touches, check_run},
    {"pp_fake_copy", 3, copy_touches, copy_run},
    {"pp_fake_spin", 1, no_touches, spin_run},
    {0},
};

const struct kernel *fake_kernel(const char *name) {
    const struct kernel *all[] = {test_kernels, fake_video_kernels, fake_phase_b_kernels, fake_digest_kernels};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        for (const struct kernel *k = all[i]; k->name; k++)
            if (strcmp(k->name, name) == 0) return k;
    return NULL;
}
