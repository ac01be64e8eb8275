/* Three stages with names and tensors of their own; built by the tests. `read` gives samples as integers; `soften` moves
 * each sample towards the mean of the chunk, once per step, alone or with a group, in parts and laps; `write` makes
 * frames of twice the size, two of each. `--plugin-arg share=N` moves by 1/N of the way. */
#include <pp_kernel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { READ, SOFTEN, WRITE, STAGES };

struct pp_session {
  pp_session_config config;
  uint64_t samples; /* of a frame */
  int64_t share;
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
  if (out->struct_size < sizeof *out || out->stage_capacity < STAGES)
    return fail(error, PP_INVALID_ARGUMENT, "pp_description is too short");
  out->spaces = 1u << PP_SPACE_HOST;
  out->chroma_formats = 1u << PP_CHROMA_MONO;
  out->digest = 3;
  strcpy((char *)out->name, "three");
  strcpy((char *)out->version, "1.0");
  memset(out->stages, 0, STAGES * sizeof *out->stages);
  strcpy((char *)out->stages[READ].name, "read");
  strcpy((char *)out->stages[SOFTEN].name, "soften");
  strcpy((char *)out->stages[WRITE].name, "write");
  out->stages[SOFTEN].kind = PP_STAGE_MIDDLE;
  out->stages[SOFTEN].flags = PP_STAGE_PARTS | PP_STAGE_GROUP | PP_STAGE_RING;
  out->stages[WRITE].kind = PP_STAGE_SINK;
  out->stage_count = STAGES;
  return PP_OK;
}

static pp_status create(const pp_session_config *config, pp_geometry *frames, pp_session **out, pp_error *error) {
  if (config->struct_size < sizeof *config) return fail(error, PP_INVALID_ARGUMENT, "pp_session_config is too short");
  int64_t share = 2;
  for (uint32_t i = 0; i < config->arg_count; i++) {
    const char *key = (const char *)config->args[i].key, *value = (const char *)config->args[i].value;
    if (strcmp(key, "share") != 0) {
      char text[100];
      snprintf(text, sizeof text, "unknown argument %.60s", key);
      return fail(error, PP_INVALID_ARGUMENT, text);
    }
    share = atoi(value);
  }
  if (share < 1) return fail(error, PP_INVALID_ARGUMENT, "share must be 1 or more");
  pp_session *s = calloc(1, sizeof *s);
  if (!s) return fail(error, PP_OUT_OF_MEMORY, "no memory for a session");
  s->config = *config;
  s->samples = (uint64_t)config->width * config->height;
  s->share = share;
  if (config->stage == WRITE) {
    frames->width *= 2;
    frames->height *= 2;
    frames->frames_per_frame = 2;
  }
  *out = s;
  return PP_OK;
}

static void destroy(pp_session *s) { free(s); }

static pp_status layout(pp_session *s, pp_layout_args *args, pp_error *error) {
  if (args->context_frames) return fail(error, PP_INVALID_ARGUMENT, "there is no context");
  pp_tensor pixels = {.name = "pixels", .dtype = PP_DTYPE_I32, .ndim = 2, .dims = {args->frames, s->samples}};
  args->input_count = s->config.stage != READ;
  args->output_count = s->config.stage != WRITE;
  if (args->input_count) args->inputs[0] = pixels;
  if (args->output_count) args->outputs[0] = pixels;
  return PP_OK;
}

/* The samples of a payload, and how many there are; a member that does not lead is told the number alone. */
static int32_t *pixels(const pp_session *s, const pp_payload *payload, uint64_t *count) {
  const pp_tensor *t = payload && payload->tensor_count == 1 ? payload->tensors : NULL;
  if (!t || strcmp((const char *)t->name, "pixels") != 0 || t->dims[0] > s->config.max_frames ||
      t->bytes != 4 * t->dims[0] * s->samples)
    return NULL;
  *count = t->bytes / 4;
  if (t->bytes > payload->bytes) return NULL;
  return (int32_t *)(void *)(payload->data + t->offset);
}

static pp_status take(pp_session *s, pp_run_args *args, pp_error *error) {
  uint64_t count;
  int32_t *out = pixels(s, args->output, &count);
  if (!out || count != args->frame_count * s->samples) return fail(error, PP_INVALID_ARGUMENT, "pixels do not fit");
  for (uint32_t f = 0; f < args->frame_count; f++) {
    const pp_plane *plane = args->frames[f].planes;
    for (uint32_t y = 0; y < plane->height; y++)
      for (uint32_t x = 0; x < plane->width; x++) *out++ = plane->data[y * plane->stride + x];
  }
  return PP_OK;
}

/* Part `part` of `parts` of so many begins here. */
static uint64_t begin(uint64_t count, uint64_t part, uint64_t parts) { return count * part / parts; }

/* The passes over this member's samples, which are `own` of `count`. */
static pp_status soften(pp_session *s, pp_run_args *args, int32_t *data, uint64_t own, uint64_t count, pp_error *error) {
  uint32_t parts = s->config.laps * s->config.parts, part = args->lap * s->config.parts + s->config.part;
  uint32_t steps = args->plan->num_denoise_steps;
  uint32_t passes = steps / parts + (part < steps % parts);
  for (uint32_t pass = 0; pass < passes; pass++) {
    int64_t sum = 0;
    for (uint64_t i = 0; i < own; i++) sum += data[i];
    pp_status status =
        args->group ? args->group->all_reduce_sum(args->group->context, (uint8_t *)&sum, 1, PP_DTYPE_I64, error) : PP_OK;
    if (status != PP_OK) return status;
    int64_t mean = sum / (int64_t)count;
    for (uint64_t i = 0; i < own; i++) data[i] += (int32_t)((mean - data[i]) / s->share);
  }
  args->observed_generator_calls = passes;
  return PP_OK;
}

/* A token goes once around. */
static pp_status around(pp_session *s, const pp_group *g, pp_error *error) {
  uint32_t me = s->config.member, members = s->config.members;
  uint8_t token = 7;
  pp_status status = PP_OK;
  if (me > 0) status = g->receive(g->context, &token, 1, me - 1, error);
  if (status == PP_OK) status = g->send(g->context, &token, 1, (me + 1) % members, error);
  if (status == PP_OK && me == 0) status = g->receive(g->context, &token, 1, members - 1, error);
  if (status == PP_OK && token != 7) return fail(error, PP_ERROR, "the token was changed on its way");
  return status == PP_OK ? g->barrier(g->context, error) : status;
}

static pp_status in_group(pp_session *s, pp_run_args *args, const int32_t *in, int32_t *out, uint64_t count,
                          pp_error *error) {
  const pp_group *g = args->group;
  uint32_t members = s->config.members;
  uint64_t listed = count;
  pp_status status = g->broadcast(g->context, (uint8_t *)&count, sizeof count, 0, error);
  if (status != PP_OK) return status;
  if (listed != count) return fail(error, PP_ERROR, "a member has another list of tensors than the leader");
  uint64_t *bytes = calloc(members, sizeof *bytes);
  for (uint32_t m = 0; m < members; m++) bytes[m] = 4 * (begin(count, m + 1, members) - begin(count, m, members));
  uint64_t own = bytes[s->config.member];
  int32_t *data = malloc(own + 1);
  status = g->scatter(g->context, (const uint8_t *)in, bytes, (uint8_t *)data, 0, error);
  if (status == PP_OK) status = soften(s, args, data, own / 4, count, error);
  if (status == PP_OK) status = g->gather(g->context, (const uint8_t *)data, bytes, (uint8_t *)out, 0, error);
  if (status == PP_OK) status = around(s, g, error);
  free(data);
  free(bytes);
  return status;
}

static pp_status soften_all(pp_session *s, pp_run_args *args, pp_error *error) {
  uint64_t count = 0, written = 0;
  int32_t *in = pixels(s, args->input, &count), *out = pixels(s, args->output, &written);
  if (args->plan->do_kv_recompute) return fail(error, PP_UNSUPPORTED, "there is no context to rebuild");
  if (s->config.member == 0 && (!in || !out || count != written))
    return fail(error, PP_INVALID_ARGUMENT, "pixels do not fit");
  if (args->group) return in_group(s, args, in, out, count, error);
  memcpy(out, in, 4 * count);
  return soften(s, args, out, count, count, error);
}

static pp_status give(pp_session *s, pp_run_args *args, pp_error *error) {
  uint64_t count;
  const int32_t *in = pixels(s, args->input, &count);
  if (!in || 2 * count != args->frame_count * s->samples) return fail(error, PP_INVALID_ARGUMENT, "pixels do not fit");
  for (uint32_t f = 0; f < args->frame_count; f++) {
    const pp_plane *plane = args->frames[f].planes;
    const int32_t *frame = in + f / 2 * s->samples;
    for (uint32_t y = 0; y < plane->height; y++)
      for (uint32_t x = 0; x < plane->width; x++)
        plane->data[y * plane->stride + x] = (uint8_t)frame[y / 2 * s->config.width + x / 2];
  }
  return PP_OK;
}

static pp_status run(pp_session *s, pp_run_args *args, pp_error *error) {
  if (args->struct_size < sizeof *args) return fail(error, PP_INVALID_ARGUMENT, "pp_run_args is too short");
  return s->config.stage == READ     ? take(s, args, error)
         : s->config.stage == SOFTEN ? soften_all(s, args, error)
                                     : give(s, args, error);
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
  };
  return &table;
}
