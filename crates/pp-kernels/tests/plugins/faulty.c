/* The median plugin with one fault, chosen by FAULT_x; built by the tests. */
#define pp_kernels_entry_v1 sound_entry
#include "../../../../plugins/median/median.c"
#undef pp_kernels_entry_v1

#if defined(FAULT_CRASH) || defined(FAULT_HANG) || defined(FAULT_EXIT)
#include <stdio.h>
#include <unistd.h>

/* In chunks of no steps alone. */
static pp_status never_returns(pp_session *s, pp_phase_b_args *args, pp_error *error) {
  if (args->plan->num_denoise_steps) return phase_b(s, args, error);
#if defined(FAULT_CRASH)
  volatile int *volatile nowhere = NULL;
  *nowhere = 1;
#elif defined(FAULT_EXIT)
  puts("the plugin says good-bye");
  exit(3);
#endif
  for (;;) pause();
}
#endif

#if defined(FAULT_UNRESOLVED)
extern int a_symbol_that_is_nowhere(void);
#endif

#if defined(FAULT_OVERRUN)
static pp_status overrun(pp_session *s, pp_phase_b_args *args, pp_error *error) {
  pp_status status = phase_b(s, args, error);
  args->output->data[args->output->bytes] ^= 1;
  return status;
}
#endif

#if defined(FAULT_GAP)
static pp_status gap(pp_session *s, pp_encode_args *args, pp_error *error) {
  pp_status status = encode(s, args, error);
  const pp_tensor *t = &args->input->tensors[1];
  args->input->data[t->offset + t->bytes] = 1;
  return status;
}
#endif

#if defined(FAULT_ERROR)
static pp_status always_fails(pp_session *s, pp_phase_b_args *args, pp_error *error) {
  (void)s, (void)args;
  return fail(error, PP_ERROR, "the model file is missing");
}
#endif

#if defined(FAULT_ERROR_TEXT)
static pp_status lies_about_text(pp_session *s, pp_phase_b_args *args, pp_error *error) {
  (void)s, (void)args;
  memset(error->text, 'x', error->capacity);
  error->text[1] = '\n';
  error->length = UINT64_MAX;
  return 77;
}
#endif

#if defined(FAULT_SELF_TEST)
static pp_status bad_self_test(pp_error *error) { return fail(error, PP_ERROR, "2 + 2 is 5"); }
#endif

#if defined(FAULT_LAYOUT_COUNT)
static pp_status bad_layout(pp_session *s, pp_layout_args *args, pp_error *error) {
  pp_status status = layout(s, args, error);
  args->input_count = 17;
  return status;
}
#elif defined(FAULT_LAYOUT_DTYPE)
static pp_status bad_layout(pp_session *s, pp_layout_args *args, pp_error *error) {
  pp_status status = layout(s, args, error);
  args->inputs[0].dtype = 99;
  return status;
}
#elif defined(FAULT_LAYOUT_SIZE)
static pp_status bad_layout(pp_session *s, pp_layout_args *args, pp_error *error) {
  pp_status status = layout(s, args, error);
  args->outputs[0].dims[0] = UINT64_MAX / 2;
  return status;
}
#elif defined(FAULT_LAYOUT_NAME)
static pp_status bad_layout(pp_session *s, pp_layout_args *args, pp_error *error) {
  pp_status status = layout(s, args, error);
  memset(args->inputs[0].name, 'a', sizeof args->inputs[0].name);
  return status;
}
#endif

#if defined(FAULT_NAME)
static pp_status bad_describe(pp_description *out, pp_error *error) {
  pp_status status = describe(out, error);
  memset(out->name, 'a', sizeof out->name);
  return status;
}
#endif

#if defined(NO_FAULT_CUDA) || defined(FAULT_CUDA_OF_1_0)
static pp_status claims_cuda(pp_description *out, pp_error *error) {
  pp_status status = describe(out, error);
  out->spaces |= 1u << PP_SPACE_CUDA;
  return status;
}
#endif

#if defined(FAULT_CALLS)
static pp_status skips_a_call(pp_session *s, pp_phase_b_args *args, pp_error *error) {
  pp_status status = phase_b(s, args, error);
  args->observed_generator_calls = 0;
  return status;
}
#endif

#if defined(FAULT_WRITES_INPUT)
static pp_status writes_its_input(pp_session *s, pp_phase_b_args *args, pp_error *error) {
  pp_status status = phase_b(s, args, error);
  args->input->data[0] ^= 1;
  return status;
}
#endif

#if defined(FAULT_IDENTITY)
static pp_status changes_a_sample(pp_session *s, pp_decode_args *args, pp_error *error) {
  pp_status status = decode(s, args, error);
  args->frames[0].planes[0].data[0] ^= 1;
  return status;
}
#endif

#if defined(FAULT_NO_SESSION)
static pp_status no_session(const pp_session_config *config, pp_session **out, pp_error *error) {
  (void)config, (void)out, (void)error;
  return PP_OK;
}
#endif

#if !defined(FAULT_NO_ENTRY)
const pp_kernels_table *pp_kernels_entry_v1(void) {
  static pp_kernels_table table;
  table = *sound_entry();
#if defined(FAULT_NULL)
  return NULL;
#elif defined(FAULT_MISALIGNED)
  return (const pp_kernels_table *)((const char *)&table + 1);
#elif defined(FAULT_MAGIC)
  table.magic += 1;
#elif defined(FAULT_MAJOR)
  table.major = 2, table.minor = 7;
#elif defined(FAULT_SHORT)
  table.struct_size = 40;
#elif defined(FAULT_MISSING)
  table.decode = NULL;
#elif defined(FAULT_UNRESOLVED)
  table.minor = (uint16_t)a_symbol_that_is_nowhere();
#elif defined(FAULT_CRASH) || defined(FAULT_HANG) || defined(FAULT_EXIT)
  table.phase_b = never_returns;
#elif defined(FAULT_AT_EXIT)
  atexit(abort);
#elif defined(FAULT_OVERRUN)
  table.phase_b = overrun;
#elif defined(FAULT_GAP)
  table.encode = gap;
#elif defined(FAULT_ERROR)
  table.phase_b = always_fails;
#elif defined(FAULT_ERROR_TEXT)
  table.phase_b = lies_about_text;
#elif defined(FAULT_SELF_TEST)
  table.self_test = bad_self_test;
#elif defined(FAULT_LAYOUT_COUNT) || defined(FAULT_LAYOUT_DTYPE) || defined(FAULT_LAYOUT_SIZE) || defined(FAULT_LAYOUT_NAME)
  table.layout = bad_layout;
#elif defined(FAULT_NAME)
  table.describe = bad_describe;
#elif defined(FAULT_CALLS)
  table.phase_b = skips_a_call;
#elif defined(FAULT_WRITES_INPUT)
  table.phase_b = writes_its_input;
#elif defined(FAULT_IDENTITY)
  table.decode = changes_a_sample;
#elif defined(FAULT_NO_SESSION)
  table.create = no_session;
#elif defined(NO_FAULT_CUDA)
  table.describe = claims_cuda;
#elif defined(FAULT_CUDA_OF_1_0)
  table.describe = claims_cuda, table.minor = 0;
#elif defined(NO_FAULT_OLDER)
  /* A host that read past the size would jump to address 8. */
  table.struct_size = sizeof table - sizeof(void *), table.self_test = (pp_status(*)(pp_error *))8;
#elif defined(NO_FAULT_NEWER)
  static struct {
    pp_kernels_table table;
    void *more[8];
  } newer;
  newer.table = table;
  newer.table.struct_size = sizeof newer, newer.table.minor = 9;
  return &newer.table;
#endif
  return &table;
}
#endif
