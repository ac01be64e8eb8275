/* The kernels of `phase_b`, computed from the formula (crates/pp-kernels/src/denoise/reference.rs) in f64: a run of any
 * number of steps gives what a device gives, within the same tolerance. A scratch frame holds the padded
 * planes as f32; only these kernels look inside. */
#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* geometry.cuh: margins of a scratch frame, and bytes for each of its places */
enum { CELL = 4, TOKEN = PATCH * PATCH, MARGIN = 24, BYTES_PER_SAMPLE = 8, REACH = 2 };
/* What guides are written less of, so that bf16 holds more of them. */
static const float CENTRE = 128;

/* attend.cu */
struct attend {
    address values, guides, out, sigma, step;
    float noise_scale, bias;
    int32_t frames, context, context_at[2], slots, first_slot, last, reserved;
    struct geometry geometry;
};

/* Where a plane begins in a scratch frame, in bytes; with index `planes`, the whole frame. */
static uint64_t scratch_offset(const struct geometry *g, int index) {
    uint64_t bytes = 0;
    for (int p = 0; p < index; p++)
        bytes += BYTES_PER_SAMPLE * (uint64_t)(g->plane[p].tokens_x * PATCH + MARGIN) *
                 (uint64_t)(g->plane[p].tokens_y * PATCH + MARGIN);
    return bytes;
}
static uint64_t scratch_bytes(const struct geometry *g) { return scratch_offset(g, g->planes); }

/* The index of the sample at (x, y) of a plane, from the frame's first token. */
static uint64_t place_of(const struct plane *plane, int x, int y) {
    int token = plane->first_token + y / PATCH * plane->tokens_x + x / PATCH;
    return (uint64_t)token * TOKEN + (uint64_t)(y % PATCH * PATCH + x % PATCH);
}

/* Frames `first` to `first + count` of a ring, as one or two ranges. */
struct ring {
    address at;
    uint64_t bytes;
    int slots, first, count;
};
static int slot_of(const struct ring *r, int index) {
    return ((r->first + index) % r->slots + r->slots) % r->slots;
}
static void touch_ring(struct launch *l, const struct ring *r,
                       void (*touch)(struct launch *, address, uint64_t)) {
    int first = slot_of(r, 0), straight = r->count < r->slots - first ? r->count : r->slots - first;
    touch(l, r->at + (uint64_t)first * r->bytes, (uint64_t)straight * r->bytes);
    touch(l, r->at, (uint64_t)(r->count - straight) * r->bytes);
}
static uint8_t *slot_at(const struct ring *r, uint8_t *straight, uint8_t *wrapped, int index) {
    int first = slot_of(r, 0), slot = slot_of(r, index);
    return slot >= first ? straight + (uint64_t)(slot - first) * r->bytes
                         : wrapped + (uint64_t)slot * r->bytes;
}

/* unfold(tokens, scratch, geometry, first_slot, slots): one row of blocks for each frame */
static struct ring unfold_ring(const struct launch *l, struct geometry *g) {
    *g = fake_geometry(l, 2);
    return (struct ring){l->parameter[1], scratch_bytes(g), (int)l->parameter[4], (int)l->parameter[3],
                         (int)l->grid[1]};
}
static void unfold_touches(struct launch *l) {
    struct geometry g;
    struct ring ring = unfold_ring(l, &g);
    fake_reads(l, l->parameter[0], fake_tokens_bytes(&g, ring.count));
    touch_ring(l, &ring, fake_writes);
}
static void unfold_from(struct launch *l, float centre) {
    TOUCH("unfold")
    struct geometry g;
    struct ring ring = unfold_ring(l, &g);
    for (int frame = 0; frame < ring.count; frame++) {
        if (frame == ring.count / 2) ppfake_pause(l->stream);
        const uint16_t *tokens = (const uint16_t *)(const void *)(reads[0] + fake_tokens_bytes(&g, frame));
        for (int p = 0; p < g.planes; p++) {
            const struct plane *plane = &g.plane[p];
            int width = PATCH * plane->tokens_x, height = PATCH * plane->tokens_y;
            float *out =
                (float *)(void *)(slot_at(&ring, writes[0], writes[1], frame) + scratch_offset(&g, p));
            for (int i = 0; i < width * height; i++)
                out[i] = centre + from_bf16(tokens[place_of(plane, i % width, i / width)]);
        }
    }
    fake_unpin_all(l);
}

static void unfold_run(struct launch *l) { unfold_from(l, 0); }
/* unfold_guides: the same of what a pass has left for the next one */
static void unfold_guides_run(struct launch *l) { unfold_from(l, CENTRE); }

static int mirrored(int i, int length) {
    int folded = (i % (2 * length) + 2 * length) % (2 * length);
    return folded < length ? folded : 2 * length - 1 - folded;
}
static double within(double value, double low, double high) {
    return value >= low ? value < high ? value : high : low;
}

/* One key frame: where its guide and its samples lie, how far away in time, how noisy the guide. */
struct key {
    const float *guide, *value;
    int radius;
    double variance, bias;
};

static void attend_plane(const float *query, double variance, const struct key *keys, int count, int width,
                         int height, double sigma, double h2, double *sums) {
    double *numerator = sums, *denominator = sums + width * height;
    memset(sums, 0, 2 * sizeof *sums * (size_t)(width * height));
    for (const struct key *key = keys; key < keys + count; key++) {
        double floor = TOKEN * 1.1 * (variance + key->variance) * sigma * sigma;
        for (int top = 0; top + PATCH <= height; top += CELL)
            for (int left = 0; left + PATCH <= width; left += CELL)
                for (int o = 0; o < (2 * key->radius + 1) * (2 * key->radius + 1); o++) {
                    int dx = o % (2 * key->radius + 1) - key->radius,
                        dy = o / (2 * key->radius + 1) - key->radius, from[TOKEN], to[TOKEN];
                    double distance = 0;
                    for (int i = 0; i < TOKEN; i++) {
                        int x = left + i % PATCH, y = top + i / PATCH;
                        to[i] = y * width + x;
                        from[i] = mirrored(y + dy, height) * width + mirrored(x + dx, width);
                        double difference = (double)query[to[i]] - (double)key->guide[from[i]];
                        distance += difference * difference;
                    }
                    double weight = exp(key->bias - fmax(distance - floor, 0) / (TOKEN * h2));
                    for (int i = 0; i < TOKEN; i++) {
                        numerator[to[i]] += weight * (double)key->value[from[i]];
                        denominator[to[i]] += weight;
                    }
                }
    }
}

static struct attend attend_of(const struct launch *l) {
    struct attend a;
    memcpy(&a, l->bytes + l->parameter[0], sizeof a);
    return a;
}
static struct ring values_of(const struct attend *a) {
    return (struct ring){a->values, scratch_bytes(&a->geometry), a->slots, a->first_slot - a->context,
                         a->context + a->frames};
}
static void attend_touches(struct launch *l) {
    struct attend a = attend_of(l);
    struct ring values = values_of(&a);
    fake_reads(l, a.sigma, 4 * (uint64_t)a.geometry.planes);
    fake_reads(l, a.step, 8);
    if (a.guides) fake_reads(l, a.guides, (uint64_t)a.frames * values.bytes);
    touch_ring(l, &values, fake_reads);
    fake_writes(l, a.out, fake_tokens_bytes(&a.geometry, a.frames));
}
static void attend_run(struct launch *l) {
    TOUCH("attend")
    struct attend a = attend_of(l);
    struct ring ring = values_of(&a);
    bool first = a.guides == 0;
    const uint8_t *guides = first ? NULL : reads[2];
    uint8_t **values = reads + (first ? 2 : 3);
    int64_t step;
    memcpy(&step, reads[1], 8);
    double strength = within((double)step / 1000, 0.001, 10), variance = first ? 1 : 0.25;
    struct key *keys = calloc((size_t)(a.context + a.frames), sizeof *keys);
    for (int p = 0; p < a.geometry.planes; p++) {
        const struct plane *plane = &a.geometry.plane[p];
        uint64_t offset = scratch_offset(&a.geometry, p);
        int width = PATCH * plane->tokens_x, height = PATCH * plane->tokens_y;
        double *sums = malloc(2 * sizeof *sums * (size_t)(width * height));
        float noise;
        memcpy(&noise, reads[0] + 4 * p, 4);
        double sigma = (double)noise * (double)a.noise_scale,
               h2 = fmax(strength * sigma * strength * sigma, 1e-6);
        for (int frame = 0; frame < a.frames; frame++) {
            if (frame == a.frames / 2) ppfake_pause(l->stream);
            int count = 0;
            for (int i = -a.context; i < a.frames; i++) {
                int apart = abs(frame - (i < 0 ? a.context_at[i + 2] : i));
                if (apart > REACH) continue;
                const float *value =
                    (const float *)(const void *)(slot_at(&ring, values[0], values[1], i + a.context) +
                                                  offset);
                bool guided = !first && i >= 0;
                const float *guide =
                    guided ? (const float *)(const void *)(guides + (uint64_t)i * ring.bytes + offset)
                           : value;
                keys[count++] = (struct key){guide, value, apart == 0 ? 4 : 2, guided ? 0.25 : 1,
                                             i < 0 ? within((double)a.bias, -80, 80) : 0};
            }
            const float *own =
                (const float *)(const void *)(slot_at(&ring, values[0], values[1], frame + a.context) +
                                              offset);
            const float *query =
                first ? own : (const float *)(const void *)(guides + (uint64_t)frame * ring.bytes + offset);
            attend_plane(query, variance, keys, count, width, height, sigma, h2, sums);
            uint16_t *to = (uint16_t *)(void *)(writes[0] + fake_tokens_bytes(&a.geometry, frame));
            for (int i = 0; i < width * height; i++) {
                double estimate = sums[i] / sums[i + width * height];
                double out =
                    a.last ? estimate : estimate + 0.5 * ((double)own[i] - estimate) - (double)CENTRE;
                to[place_of(plane, i % width, i / width)] = to_bf16((float)out);
            }
        }
        free(sums);
    }
    free(keys);
    fake_unpin_all(l);
}

const struct kernel fake_phase_b_kernels[] = {
    {"unfold", 5, unfold_touches, unfold_run},
    {"unfold_guides", 5, unfold_touches, unfold_guides_run},
    {"attend_first_1", 1, attend_touches, attend_run},
    {"attend_first_2", 1, attend_touches, attend_run},
    {"attend_first_4", 1, attend_touches, attend_run},
    {"attend_next_1", 1, attend_touches, attend_run},
    {"attend_next_2", 1, attend_touches, attend_run},
    {"attend_next_4", 1, attend_touches, attend_run},
    {0},
};
