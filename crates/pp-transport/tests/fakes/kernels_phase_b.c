/* Phase B's kernels: what they read and write, in their order, and not what they compute. Where a run has no
 * denoising steps nothing reads their results; with steps every sample becomes grey. */
#include "kernels.h"

#include <string.h>

/* geometry.cuh: margins of a scratch frame, and bytes for each of its places */
enum { MARGIN = 24, BYTES_PER_SAMPLE = 8 };
#define GREY 0x4300 /* 128 as bf16 */

static uint64_t scratch_bytes(const struct geometry *g) {
    uint64_t bytes = 0;
    for (int p = 0; p < g->planes; p++)
        bytes += BYTES_PER_SAMPLE * (uint64_t)(g->plane[p].tokens_x * PATCH + MARGIN) *
                 (uint64_t)(g->plane[p].tokens_y * PATCH + MARGIN);
    return bytes;
}

typedef void (*note)(struct launch *l, address at, uint64_t bytes);

/* `count` scratch frames of a ring, from slot `first` on. */
static void ring(struct launch *l, note note, address at, const struct geometry *g, int32_t first,
                 int32_t count, int32_t slots) {
    int32_t before_end = count < slots - first ? count : slots - first;
    note(l, at + (uint64_t)first * scratch_bytes(g), (uint64_t)before_end * scratch_bytes(g));
    note(l, at, (uint64_t)(count - before_end) * scratch_bytes(g));
}

/* unfold(tokens, scratch, geometry, first_slot, slots), for grid.y = frames * planes */
static void unfold_touches(struct launch *l) {
    struct geometry g = fake_geometry(l, 2);
    int32_t frames = (int32_t)l->grid[1] / g.planes;
    fake_reads(l, l->parameter[0], fake_tokens_bytes(&g, frames));
    ring(l, fake_writes, l->parameter[1], &g, (int32_t)l->parameter[3], frames, (int32_t)l->parameter[4]);
}
static void unfold_run(struct launch *l) {
    TOUCH("unfold")
    for (unsigned i = 0; i < l->write_count; i++) memset(writes[i], 0x55, l->writes[i].bytes);
    fake_unpin_all(l);
}

/* attend_*(Attend): attend.cu */
struct attend {
    uint64_t values, guides, out, sigma, step;
    float noise_scale, bias;
    int32_t frames, context, context_at[2], slots, first_slot, last, reserved;
    struct geometry geometry;
};
static void attend_touches(struct launch *l) {
    struct attend a;
    memcpy(&a, l->bytes + l->parameter[0], sizeof a);
    ring(l, fake_reads, a.values, &a.geometry, (a.first_slot + a.slots - a.context) % a.slots,
         a.frames + a.context, a.slots);
    if (a.guides) fake_reads(l, a.guides, (uint64_t)a.frames * scratch_bytes(&a.geometry));
    fake_reads(l, a.sigma, 4 * (uint64_t)a.geometry.planes);
    fake_reads(l, a.step, 8);
    fake_writes(l, a.out, fake_tokens_bytes(&a.geometry, a.frames));
}
static void attend_run(struct launch *l) {
    TOUCH("attend")
    for (uint64_t i = 0; l->write_count && i < l->writes[0].bytes; i += 2) {
        if (i == l->writes[0].bytes / 4 * 2) ppfake_pause(l->stream);
        memcpy(writes[0] + i, &(uint16_t){GREY}, 2);
    }
    fake_unpin_all(l);
}

static const struct kernel known[] = {
    {"unfold", 5, unfold_touches, unfold_run},         {"unfold_guides", 5, unfold_touches, unfold_run},
    {"attend_first_1", 1, attend_touches, attend_run}, {"attend_first_2", 1, attend_touches, attend_run},
    {"attend_first_4", 1, attend_touches, attend_run}, {"attend_next_1", 1, attend_touches, attend_run},
    {"attend_next_2", 1, attend_touches, attend_run},  {"attend_next_4", 1, attend_touches, attend_run},
};

const struct kernel *fake_phase_b_kernel(const char *name) {
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, name) == 0) return &known[i];
    return NULL;
}
