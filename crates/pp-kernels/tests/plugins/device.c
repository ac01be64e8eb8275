/* The median plugin on either memory, sound or with one fault on a device; built by the tests. It computes on the host,
 * and so it waits in its calls, which a real one must not do. */
#define pp_kernels_entry_v2 sound_entry
#include "../../../../plugins/median/median.c"
#undef pp_kernels_entry_v2

/* The driver's. */
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream);
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream);
int cuStreamSynchronize(void *stream);

/* The sessions on the device. */
static pp_session *on_device[64];
static void *stream;

static int is_on_device(const pp_session *s) {
  for (int at = 0; at < 64; at++)
    if (on_device[at] == s) return 1;
  return 0;
}

static pp_status says_both(pp_description *out, pp_error *error) {
  pp_status status = describe(out, error);
  out->spaces |= 1u << PP_SPACE_CUDA;
#if defined(NO_FAULT_ALIKE) || defined(FAULT_OTHER_BYTES)
  for (uint32_t at = 0; at < out->stage_count; at++) out->stages[at].flags |= PP_STAGE_SAME_BYTES;
#endif
  return status;
}

static pp_status takes_both(const pp_session_config *config, pp_geometry *frames, pp_session **out, pp_error *error) {
  pp_session_config host = *config;
  host.space = PP_SPACE_HOST;
  pp_status status = create(&host, frames, out, error);
  if (status != PP_OK || config->space != PP_SPACE_CUDA) return status;
  stream = (void *)(uintptr_t)config->stream;
  int at = 0;
  while (on_device[at]) at++;
  on_device[at] = *out;
  return status;
}

static void forgets(pp_session *s) {
  for (int at = 0; at < 64; at++)
    if (on_device[at] == s) on_device[at] = NULL;
  destroy(s);
}

static void get(void *to, const uint8_t *from, uint64_t bytes) {
  if (bytes) cuMemcpyDtoHAsync_v2(to, (uint64_t)(uintptr_t)from, bytes, stream);
  cuStreamSynchronize(stream);
}

static void put(uint8_t *to, const void *from, uint64_t bytes) {
  if (bytes) cuMemcpyHtoDAsync_v2((uint64_t)(uintptr_t)to, from, bytes, stream);
  cuStreamSynchronize(stream);
}

/* Changes a byte on the device. */
static inline void poke(uint8_t *at) {
  uint8_t byte;
  get(&byte, at, 1);
  byte ^= 1;
  put(at, &byte, 1);
}

static pp_payload fetched(const pp_payload *payload) {
  pp_payload copy = *payload;
  copy.data = malloc(payload->bytes + 1);
  get(copy.data, payload->data, payload->bytes);
  return copy;
}

static pp_status encode_either(pp_session *s, pp_run_args *args, pp_error *error) {
  if (!is_on_device(s)) return encode(s, args, error);
  pp_payload output = fetched(args->output);
  pp_run_args host = *args;
  host.output = &output;
  pp_status status = encode(s, &host, error);
  put(args->output->data, output.data, output.bytes);
  free(output.data);
#if defined(FAULT_GAP)
  const pp_tensor *t = &args->output->tensors[1];
  if (status == PP_OK) poke(args->output->data + t->offset + t->bytes);
#endif
#if defined(FAULT_WRITES_FRAMES)
  if (status == PP_OK) args->frames[0].planes[0].data[0] ^= 1;
#endif
  return status;
}

static pp_status phase_b_either(pp_session *s, pp_run_args *args, pp_error *error) {
  if (!is_on_device(s)) return phase_b(s, args, error);
  pp_payload input = fetched(args->input), output = fetched(args->output);
  pp_run_args host = *args;
  host.input = &input, host.output = &output;
  pp_status status = phase_b(s, &host, error);
  args->observed_generator_calls = host.observed_generator_calls;
  put(args->output->data, output.data, output.bytes);
  free(input.data), free(output.data);
#if defined(FAULT_FRONT)
  if (status == PP_OK) poke(args->output->data - 1);
#elif defined(FAULT_BEHIND)
  if (status == PP_OK) poke(args->output->data + args->output->bytes);
#elif defined(FAULT_WRITES_INPUT)
  if (status == PP_OK) poke(args->input->data);
#elif defined(FAULT_OTHER_BYTES)
  if (status == PP_OK) poke(args->output->data);
#endif
  return status;
}

static pp_status decode_either(pp_session *s, pp_run_args *args, pp_error *error) {
  if (!is_on_device(s)) return decode(s, args, error);
  pp_payload input = fetched(args->input);
  pp_run_args host = *args;
  host.input = &input;
  pp_status status = decode(s, &host, error);
  free(input.data);
#if defined(FAULT_OUTSIDE)
  if (status == PP_OK) args->frames[0].planes[0].data[-1] ^= 1;
#endif
  return status;
}

static pp_status run_either(pp_session *s, pp_run_args *args, pp_error *error) {
  return s->stage == ENCODE    ? encode_either(s, args, error)
         : s->stage == PHASE_B ? phase_b_either(s, args, error)
                               : decode_either(s, args, error);
}

const pp_kernels_table *pp_kernels_entry_v2(void) {
  static pp_kernels_table table;
  table = *sound_entry();
  table.describe = says_both, table.create = takes_both, table.run = run_either, table.destroy = forgets;
  return &table;
}
