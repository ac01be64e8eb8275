/*
 * Example plugin in C: a 3x3 median of every plane, once per step.
 *
 *     cc -shared -fPIC -O2 -I crates/pp-kernels/include -o median.so plugins/median/median.c
 *
 * Latents are the samples themselves, plane after plane without padding, as bf16 [frames, samples]. Every frame is on
 * its own: there is no context, a recompute has nothing to rebuild, frames may be missing and steps may differ.
 */
#include <pp_kernel.h>
#include <stdlib.h>
#include <string.h>

enum { ENCODE, PHASE_B, DECODE, STAGES };

struct pp_session {
  uint32_t stage;
  uint32_t planes, max_frames;
  uint64_t width[3], height[3], samples; /* samples: of a frame */
  uint16_t *scratch;                     /* one frame */
};

static pp_status fail(pp_error *error, pp_status status, const char *text) {
  if (error && error->struct_size >= sizeof *error) {
    uint64_t length = strlen(text);
    if (length > error->capacity) length = error->capacity;
    memcpy(error->text, text, length);
    error->length = length;
  }
  return status;
}

static pp_status describe(pp_description *out, pp_error *error) {
  if (out->struct_size < sizeof *out) return fail(error, PP_INVALID_ARGUMENT, "pp_description is too short");
  out->spaces = 1u << PP_SPACE_HOST;
  out->chroma_formats = 1u << PP_CHROMA_MONO | 1u << PP_CHROMA_420 | 1u << PP_CHROMA_422 | 1u << PP_CHROMA_444;
  out->context_frames = 0;
  out->digest = 0x6d656469616e0001ull;
  strcpy((char *)out->name, "median");
  strcpy((char *)out->version, "2.0");
  static const struct { const char *name; uint32_t kind; } stages[STAGES] = {
      {"encode", PP_STAGE_SOURCE}, {"phase_b", PP_STAGE_MIDDLE}, {"decode", PP_STAGE_SINK}};
  if (out->stage_capacity < STAGES) return fail(error, PP_INVALID_ARGUMENT, "no room for three stages");
  for (int i = 0; i < STAGES; i++) {
    memset(&out->stages[i], 0, sizeof out->stages[i]);
    strcpy((char *)out->stages[i].name, stages[i].name);
    out->stages[i].kind = stages[i].kind;
    out->stages[i].flags = PP_STAGE_GAPS | PP_STAGE_STEPS;
  }
  out->stage_count = STAGES;
  return PP_OK;
}

static void destroy(pp_session *s) {
  if (s) free(s->scratch);
  free(s);
}

static pp_status create(const pp_session_config *config, pp_geometry *frames, pp_session **out, pp_error *error) {
  (void)frames; /* the sink's frames are like the source's */
  if (config->struct_size < sizeof *config) return fail(error, PP_INVALID_ARGUMENT, "pp_session_config is too short");
  if (config->space != PP_SPACE_HOST) return fail(error, PP_UNSUPPORTED, "median works on host memory only");
  if (config->stage >= STAGES) return fail(error, PP_INVALID_ARGUMENT, "median has three stages");
  if (config->arg_count) return fail(error, PP_INVALID_ARGUMENT, "median takes no --plugin-arg");
  if (config->chroma > PP_CHROMA_444) return fail(error, PP_UNSUPPORTED, "unknown chroma format");
  pp_session *s = calloc(1, sizeof *s);
  if (!s) return fail(error, PP_OUT_OF_MEMORY, "no memory for a session");
  s->stage = config->stage;
  s->planes = config->chroma == PP_CHROMA_MONO ? 1 : 3;
  s->max_frames = config->max_frames;
  for (uint32_t p = 0; p < s->planes; p++) {
    int half_x = p && config->chroma != PP_CHROMA_444, half_y = p && config->chroma == PP_CHROMA_420;
    s->width[p] = half_x ? (config->width + 1) / 2 : config->width;
    s->height[p] = half_y ? (config->height + 1) / 2 : config->height;
    s->samples += s->width[p] * s->height[p];
  }
  s->scratch = malloc(s->samples * sizeof *s->scratch);
  if (!s->scratch) {
    destroy(s);
    return fail(error, PP_OUT_OF_MEMORY, "no memory for a frame");
  }
  *out = s;
  return PP_OK;
}

static void describe_tensor(pp_tensor *t, const char *name, uint32_t dtype, uint32_t ndim, uint64_t d0, uint64_t d1) {
  memset(t, 0, sizeof *t);
  strcpy((char *)t->name, name);
  t->dtype = dtype;
  t->ndim = ndim;
  t->dims[0] = d0;
  t->dims[1] = d1;
}

static pp_status layout(pp_session *s, pp_layout_args *args, pp_error *error) {
  if (args->struct_size < sizeof *args) return fail(error, PP_INVALID_ARGUMENT, "pp_layout_args is too short");
  if (args->context_frames) return fail(error, PP_INVALID_ARGUMENT, "median has no context");
  if (args->capacity < 3) return fail(error, PP_INVALID_ARGUMENT, "no room for three tensors");
  if (s->stage != DECODE) { /* what encode gives and phase_b gets */
    pp_tensor *sent = s->stage == ENCODE ? args->outputs : args->inputs;
    describe_tensor(&sent[0], "latents_in", PP_DTYPE_BF16, 2, args->frames, s->samples);
    describe_tensor(&sent[1], "conditioning_embeds", PP_DTYPE_BF16, 1, 1, 0);
    describe_tensor(&sent[2], "denoising_step_list", PP_DTYPE_I64, 1, args->steps, 0);
  }
  if (s->stage != ENCODE) /* what phase_b gives and decode gets */
    describe_tensor(s->stage == PHASE_B ? args->outputs : args->inputs, "latents_out", PP_DTYPE_BF16, 2, args->frames,
                    s->samples);
  args->input_count = s->stage == ENCODE ? 0 : s->stage == PHASE_B ? 3 : 1;
  args->output_count = s->stage == ENCODE ? 3 : s->stage == PHASE_B ? 1 : 0;
  return PP_OK;
}

/* The tensor's address, if it is there, lies within the payload and has the bytes it must have. */
static void *find(const pp_payload *payload, const char *name, uint64_t bytes) {
  for (uint32_t i = 0; i < payload->tensor_count; i++) {
    const pp_tensor *t = &payload->tensors[i];
    if (strncmp((const char *)t->name, name, sizeof t->name) == 0)
      return t->bytes == bytes && t->offset <= payload->bytes && bytes <= payload->bytes - t->offset
                 ? payload->data + t->offset
                 : NULL;
  }
  return NULL;
}

/* The frames of a payload: the first dimension of its first tensor; 0 if that makes no sense for the session. */
static uint64_t frames_of(const pp_session *s, const pp_payload *payload) {
  uint64_t frames = payload->tensor_count ? payload->tensors[0].dims[0] : 0;
  return frames <= s->max_frames ? frames : 0;
}

static uint16_t to_bf16(uint8_t sample) {
  float f = sample;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return (uint16_t)(bits >> 16); /* exact: a sample has 8 bits, so the lower half is zero */
}

static uint8_t from_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f >= 0.0f && f <= 255.0f ? (uint8_t)(f + 0.5f) : f > 255.0f ? 255 : 0;
}

static pp_status encode(pp_session *s, pp_run_args *args, pp_error *error) {
  uint64_t steps = args->plan->num_denoise_steps;
  uint16_t *latents = find(args->output, "latents_in", args->frame_count * s->samples * 2);
  uint16_t *conditioning = find(args->output, "conditioning_embeds", 2);
  int64_t *list = find(args->output, "denoising_step_list", steps * 8);
  if (!latents || !conditioning || (steps && !list)) return fail(error, PP_INVALID_ARGUMENT, "a tensor is missing");
  for (uint32_t f = 0; f < args->frame_count; f++)
    for (uint32_t p = 0; p < s->planes; p++) {
      const pp_plane *plane = &args->frames[f].planes[p];
      for (uint64_t y = 0; y < s->height[p]; y++)
        for (uint64_t x = 0; x < s->width[p]; x++) *latents++ = to_bf16(plane->data[y * plane->stride + x]);
    }
  *conditioning = 0;
  for (uint64_t step = 0; step < steps; step++) list[step] = (int64_t)step + 1;
  return PP_OK;
}

/* Non-negative bf16 values compare like their bits. */
static int compare(const void *a, const void *b) { return *(const uint16_t *)a - *(const uint16_t *)b; }

static uint16_t median(const uint16_t *plane, uint64_t width, uint64_t height, uint64_t x, uint64_t y) {
  uint16_t near[9];
  int n = 0;
  for (int dy = -1; dy <= 1; dy++)
    for (int dx = -1; dx <= 1; dx++) {
      int64_t nx = (int64_t)x + dx, ny = (int64_t)y + dy;
      nx = nx < 0 ? 0 : nx >= (int64_t)width ? (int64_t)width - 1 : nx;
      ny = ny < 0 ? 0 : ny >= (int64_t)height ? (int64_t)height - 1 : ny;
      near[n++] = plane[ny * (int64_t)width + nx];
    }
  qsort(near, 9, sizeof near[0], compare);
  return near[4];
}

static pp_status phase_b(pp_session *s, pp_run_args *args, pp_error *error) {
  if (args->plan->do_kv_recompute) return fail(error, PP_UNSUPPORTED, "median has no context to rebuild");
  uint64_t frames = frames_of(s, args->input), bytes = frames * s->samples * 2;
  const uint16_t *in = find(args->input, "latents_in", bytes);
  uint16_t *out = find(args->output, "latents_out", bytes);
  if (!frames || !in || !out) return fail(error, PP_INVALID_ARGUMENT, "latents_in or latents_out does not fit");
  memcpy(out, in, bytes);
  for (uint32_t step = 0; step < args->plan->num_denoise_steps; step++) {
    uint16_t *frame = out;
    for (uint64_t f = 0; f < frames; f++) {
      uint16_t *plane = frame;
      memcpy(s->scratch, frame, s->samples * 2);
      const uint16_t *source = s->scratch;
      for (uint32_t p = 0; p < s->planes; p++) {
        for (uint64_t y = 0; y < s->height[p]; y++)
          for (uint64_t x = 0; x < s->width[p]; x++)
            plane[y * s->width[p] + x] = median(source, s->width[p], s->height[p], x, y);
        plane += s->width[p] * s->height[p];
        source += s->width[p] * s->height[p];
      }
      frame += s->samples;
    }
  }
  args->observed_generator_calls = args->plan->num_denoise_steps;
  return PP_OK;
}

static pp_status decode(pp_session *s, pp_run_args *args, pp_error *error) {
  const uint16_t *latents = find(args->input, "latents_out", args->frame_count * s->samples * 2);
  if (!latents) return fail(error, PP_INVALID_ARGUMENT, "latents_out does not fit");
  for (uint32_t f = 0; f < args->frame_count; f++)
    for (uint32_t p = 0; p < s->planes; p++) {
      const pp_plane *plane = &args->frames[f].planes[p];
      for (uint64_t y = 0; y < s->height[p]; y++)
        for (uint64_t x = 0; x < s->width[p]; x++) plane->data[y * plane->stride + x] = from_bf16(*latents++);
    }
  return PP_OK;
}

static pp_status run(pp_session *s, pp_run_args *args, pp_error *error) {
  if (args->struct_size < sizeof *args) return fail(error, PP_INVALID_ARGUMENT, "pp_run_args is too short");
  return s->stage == ENCODE ? encode(s, args, error) : s->stage == PHASE_B ? phase_b(s, args, error) : decode(s, args, error);
}

static pp_status self_test(pp_error *error) {
  const uint16_t plane[9] = {9, 1, 8, 2, 7, 3, 6, 4, 5};
  if (median(plane, 3, 3, 1, 1) != 5) return fail(error, PP_ERROR, "the median of 1 to 9 is not 5");
  return PP_OK;
}

const pp_kernels_table *pp_kernels_entry_v2(void) {
  static const pp_kernels_table table = {
      .magic = PP_KERNELS_MAGIC,
      .struct_size = sizeof(pp_kernels_table),
      .major = PP_KERNELS_MAJOR,
      .minor = PP_KERNELS_MINOR,
      .describe = describe,
      .create = create,
      .destroy = destroy,
      .layout = layout,
      .run = run,
      .self_test = self_test,
  };
  return &table;
}
