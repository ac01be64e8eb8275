/* The kernels of pp-kernels for encode and decode, and synthetic work, with the parameters and results of
 * crates/pp-kernels/kernels. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct geometry fake_geometry(const struct launch *l, unsigned parameter) {
    struct geometry g;
    memcpy(&g, l->bytes + l->parameter[parameter], sizeof g);
    return g;
}
uint64_t fake_frame_bytes(const struct geometry *g) {
    uint64_t bytes = 0;
    for (int p = 0; p < g->planes; p++) bytes += (uint64_t)g->plane[p].width * (uint64_t)g->plane[p].height;
    return bytes;
}
uint64_t fake_tokens_bytes(const struct geometry *g, int32_t frames) {
    return (uint64_t)g->tokens * (uint64_t)frames * TOKEN_BYTES;
}
static uint64_t frames_bytes(const struct geometry *g, uint64_t stride, int32_t count) {
    return count > 0 ? stride * (uint64_t)(count - 1) + fake_frame_bytes(g) : 0;
}

static int least(int a, int b) { return a < b ? a : b; }

/* Between samples and tokens, one way or the other. */
static void convert(struct launch *l, const struct geometry *g, uint8_t *frames, uint64_t stride,
                    uint8_t *tokens, int count, bool encode) {
    for (int frame = 0; frame < count; frame++) {
        if (frame == count / 2) ppfake_pause(l->stream);
        for (int p = 0; p < g->planes; p++) {
            const struct plane *plane = &g->plane[p];
            uint8_t *samples = frames + stride * (uint64_t)frame + plane->offset;
            for (int t = 0; t < plane->tokens_x * plane->tokens_y; t++) {
                uint8_t *token =
                    tokens + ((uint64_t)frame * (uint64_t)g->tokens + (uint64_t)(plane->first_token + t)) *
                                 TOKEN_BYTES;
                for (int i = 0; i < PATCH * PATCH; i++) {
                    int x = t % plane->tokens_x * PATCH + i % PATCH,
                        y = t / plane->tokens_x * PATCH + i / PATCH;
                    uint16_t half;
                    if (encode) {
                        half = to_bf16(
                            samples[least(y, plane->height - 1) * plane->width + least(x, plane->width - 1)]);
                        memcpy(token + 2 * i, &half, 2);
                    } else if (x < plane->width && y < plane->height) {
                        memcpy(&half, token + 2 * i, 2);
                        float value = from_bf16(half) + 0.5f;
                        samples[y * plane->width + x] = value >= 255.0f ? 255
                                                        : value > 0.0f  ? (uint8_t)value
                                                                        : 0;
                    }
                }
            }
        }
    }
}

/* encode(frames, frame_stride, tokens, geometry, frame_count) */
static void encode_touches(struct launch *l) {
    struct geometry g = fake_geometry(l, 3);
    fake_reads(l, l->parameter[0], frames_bytes(&g, l->parameter[1], (int32_t)l->parameter[4]));
    fake_writes(l, l->parameter[2], fake_tokens_bytes(&g, (int32_t)l->parameter[4]));
}
/* decode(tokens, frames, frame_stride, geometry, frame_count) */
static void decode_touches(struct launch *l) {
    struct geometry g = fake_geometry(l, 3);
    fake_reads(l, l->parameter[0], fake_tokens_bytes(&g, (int32_t)l->parameter[4]));
    fake_writes(l, l->parameter[1], frames_bytes(&g, l->parameter[2], (int32_t)l->parameter[4]));
}

static void encode_run(struct launch *l) {
    TOUCH("encode")
    struct geometry g = fake_geometry(l, 3);
    if (l->read_count && l->write_count)
        convert(l, &g, reads[0], l->parameter[1], writes[0], (int32_t)l->parameter[4], true);
    fake_unpin_all(l);
}
static void decode_run(struct launch *l) {
    TOUCH("decode")
    struct geometry g = fake_geometry(l, 3);
    if (l->read_count && l->write_count)
        convert(l, &g, writes[0], l->parameter[2], reads[0], (int32_t)l->parameter[4], false);
    fake_unpin_all(l);
}

/* noise_count(frame, geometry, histogram) */
static void count_touches(struct launch *l) {
    struct geometry g = fake_geometry(l, 1);
    fake_reads(l, l->parameter[0], fake_frame_bytes(&g));
    fake_writes(l, l->parameter[2], (uint64_t)g.planes * BINS * 4);
}
static void count_run(struct launch *l) {
    TOUCH("noise_count")
    struct geometry g = fake_geometry(l, 1);
    for (int p = 0; p < g.planes; p++) {
        const struct plane *plane = &g.plane[p];
        uint32_t *bins = (uint32_t *)(void *)(writes[0] + (uint64_t)p * BINS * 4);
        for (int y = 1; y < plane->height - 1; y++)
            for (int x = 1; x < plane->width - 1; x++) {
                const uint8_t *b = reads[0] + plane->offset + y * plane->width + x, *a = b - plane->width,
                              *c = b + plane->width;
                if (*b == 0 || *b == 255) continue;
                bins[abs(a[-1] + a[1] + c[-1] + c[1] - 2 * (a[0] + b[-1] + b[1] + c[0]) + 4 * b[0])]++;
            }
    }
    fake_unpin_all(l);
}

/* noise_sigma(histogram, sigma): one block for each plane */
static void sigma_touches(struct launch *l) {
    fake_writes(l, l->parameter[0], (uint64_t)l->grid[0] * BINS * 4);
    fake_writes(l, l->parameter[1], (uint64_t)l->grid[0] * 4);
}
static void sigma_run(struct launch *l) {
    TOUCH("noise_sigma")
    for (unsigned p = 0; p < l->grid[0]; p++) {
        uint32_t *bins = (uint32_t *)(void *)(writes[0] + (uint64_t)p * BINS * 4);
        double total = 0, below = 0;
        float sigma = 0;
        for (int i = 0; i < BINS; i++) total += bins[i];
        for (int i = 0; i < BINS; i++) {
            double start = i == 0 ? 0 : i - 0.5, length = i == 0 ? 0.5 : 1;
            if (total > 0 && below < total / 2 && below + bins[i] >= total / 2)
                sigma = (float)((start + length * (total / 2 - below) / bins[i]) / (6.0 * 0.67448975));
            below += bins[i];
            bins[i] = 0;
        }
        memcpy(writes[1] + 4 * (size_t)p, &sigma, 4);
    }
    fake_unpin_all(l);
}

/* conditioning(sigma, planes, embeds, steps, step_count, first, rest) */
static void conditioning_touches(struct launch *l) {
    fake_reads(l, l->parameter[0], 4 * l->parameter[1]);
    fake_writes(l, l->parameter[2], 2 * l->parameter[1]);
    fake_writes(l, l->parameter[3], 8 * l->parameter[4]);
}
static void conditioning_run(struct launch *l) {
    TOUCH("conditioning")
    for (uint64_t p = 0; p < l->parameter[1]; p++) {
        float sigma;
        memcpy(&sigma, reads[0] + 4 * p, 4);
        uint16_t half = to_bf16(sigma);
        memcpy(writes[0] + 2 * p, &half, 2);
    }
    for (uint64_t i = 0; i < l->parameter[4]; i++)
        memcpy(writes[1] + 8 * i, &l->parameter[i == 0 ? 5 : 6], 8);
    fake_unpin_all(l);
}

/* condition(embeds, planes, sigma) */
static void condition_touches(struct launch *l) {
    fake_reads(l, l->parameter[0], 2 * l->parameter[1]);
    fake_writes(l, l->parameter[2], 4 * l->parameter[1]);
}
static void condition_run(struct launch *l) {
    TOUCH("condition")
    for (uint64_t p = 0; p < l->parameter[1]; p++) {
        uint16_t half;
        memcpy(&half, reads[0] + 2 * p, 2);
        float sigma = from_bf16(half);
        sigma = sigma >= 0 ? sigma : 0;
        sigma = sigma > 255 ? 255 : sigma;
        memcpy(writes[0] + 4 * p, &sigma, 4);
    }
    fake_unpin_all(l);
}

/* spin(nanoseconds) */
static void spin_touches(struct launch *l) { (void)l; }
static void spin_run(struct launch *l) { usleep((useconds_t)(l->parameter[0] / 1000)); }

/* hbm_copy(from, to, count, repeats), hbm_read(from, sink, count, repeats), hbm_write(to, count, repeats):
 * the order they need, not the traffic */
static void copy_touches(struct launch *l) {
    fake_reads(l, l->parameter[0], 16 * l->parameter[2]);
    fake_writes(l, l->parameter[1], 16 * l->parameter[2]);
}
static void copy_run(struct launch *l) {
    TOUCH("hbm_copy")
    memcpy(writes[0], reads[0], 16 * l->parameter[2]);
    fake_unpin_all(l);
}
static void read_touches(struct launch *l) { fake_reads(l, l->parameter[0], 16 * l->parameter[2]); }
static void write_touches(struct launch *l) { fake_writes(l, l->parameter[0], 16 * l->parameter[1]); }
static void look(struct launch *l) {
    TOUCH("hbm")
    fake_unpin_all(l);
}

const struct kernel fake_video_kernels[] = {
    {"encode", 5, encode_touches, encode_run},
    {"decode", 5, decode_touches, decode_run},
    {"noise_count", 3, count_touches, count_run},
    {"noise_sigma", 2, sigma_touches, sigma_run},
    {"conditioning", 7, conditioning_touches, conditioning_run},
    {"condition", 3, condition_touches, condition_run},
    {"spin", 1, spin_touches, spin_run},
    {"hbm_copy", 4, copy_touches, copy_run},
    {"hbm_read", 4, read_touches, look},
    {"hbm_write", 3, write_touches, look},
    {0},
};
