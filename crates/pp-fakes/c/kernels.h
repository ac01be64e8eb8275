/* What the files of kernels share. A kernel says beforehand what it reads and writes, for the recording, and
 * gets exactly that when it runs. */
#ifndef PP_FAKE_KERNELS_H
#define PP_FAKE_KERNELS_H

#include "fake.h"

void fake_reads(struct launch *l, address at, uint64_t bytes);
void fake_writes(struct launch *l, address at, uint64_t bytes);
/* What was said to be read and written, pinned; false (and nothing pinned) where that is not all live memory.
 */
bool fake_pin_all(struct launch *l, const char *who, uint8_t **reads, uint8_t **writes);
void fake_unpin_all(struct launch *l);
#define TOUCH(who)                                   \
    uint8_t *reads[MAX_RANGES], *writes[MAX_RANGES]; \
    (void)reads, (void)writes;                       \
    if (!fake_pin_all(l, who, reads, writes)) return;

/* Each ends with a kernel without a name. */
extern const struct kernel fake_video_kernels[], fake_phase_b_kernels[], fake_digest_kernels[];

/* geometry.cuh */
enum { PATCH = 8, TOKEN_BYTES = 2 * PATCH * PATCH, BINS = 4096 };
struct plane {
    int32_t width, height, tokens_x, tokens_y, first_token, offset;
};
struct geometry {
    int32_t planes, tokens;
    struct plane plane[3];
};

struct geometry fake_geometry(const struct launch *l, unsigned parameter);
uint64_t fake_frame_bytes(const struct geometry *g);
uint64_t fake_tokens_bytes(const struct geometry *g, int32_t frames);

#endif
