/* The median plugin with one fault, chosen by FAULT_x; built by the tests. */
#define pp_kernels_entry_v1 sound_entry
#include "../../../../plugins/median/median.c"
#undef pp_kernels_entry_v1

#include <stdio.h>
#include <unistd.h>

/* Each fault defines `spoil`, which changes a copy of the sound table and gives what the entry returns. */
#define ENTRY(...)                                                    \
  static const pp_kernels_table *spoil(pp_kernels_table *table) {     \
    (void)table;                                                      \
    __VA_ARGS__;                                                      \
  }
#define TABLE(...) ENTRY(__VA_ARGS__; return table)
/* A call that does something else. */
#define INSTEAD(call, type, ...)                                                     \
  static pp_status at_fault(pp_session *s, type *args, pp_error *error) {            \
    (void)s, (void)args, (void)error;                                                \
    __VA_ARGS__;                                                                     \
  }                                                                                  \
  TABLE(table->call = at_fault)
/* A call that does what it should, and then something else. */
#define AFTER(call, type, ...) INSTEAD(call, type, pp_status status = call(s, args, error); __VA_ARGS__; return status)
/* A call that does not come back from chunks of no steps. */
#define NEVER_RETURNS(...)                                                                               \
  INSTEAD(phase_b, pp_phase_b_args, if (args->plan->num_denoise_steps) return phase_b(s, args, error); \
          __VA_ARGS__; for (;;) pause())

#if defined(FAULT_CRASH)
NEVER_RETURNS(volatile int *volatile nowhere = NULL; *nowhere = 1)
#elif defined(FAULT_EXIT)
NEVER_RETURNS(puts("the plugin says good-bye"); exit(3))
#elif defined(FAULT_HANG)
NEVER_RETURNS()
#elif defined(FAULT_AT_EXIT)
TABLE(atexit(abort))
#elif defined(FAULT_OVERRUN)
AFTER(phase_b, pp_phase_b_args, args->output->data[args->output->bytes] ^= 1)
#elif defined(FAULT_GAP)
AFTER(encode, pp_encode_args, const pp_tensor *t = &args->input->tensors[1]; args->input->data[t->offset + t->bytes] = 1)
#elif defined(FAULT_CALLS)
AFTER(phase_b, pp_phase_b_args, args->observed_generator_calls = 0)
#elif defined(FAULT_WRITES_INPUT)
AFTER(phase_b, pp_phase_b_args, args->input->data[0] ^= 1)
#elif defined(FAULT_IDENTITY)
AFTER(decode, pp_decode_args, args->frames[0].planes[0].data[0] ^= 1)
#elif defined(FAULT_LAYOUT_COUNT)
AFTER(layout, pp_layout_args, args->input_count = 17)
#elif defined(FAULT_LAYOUT_DTYPE)
AFTER(layout, pp_layout_args, args->inputs[0].dtype = 99)
#elif defined(FAULT_LAYOUT_SIZE)
AFTER(layout, pp_layout_args, args->outputs[0].dims[0] = UINT64_MAX / 2)
#elif defined(FAULT_LAYOUT_NAME)
AFTER(layout, pp_layout_args, memset(args->inputs[0].name, 'a', sizeof args->inputs[0].name))
#elif defined(FAULT_ERROR)
INSTEAD(phase_b, pp_phase_b_args, return fail(error, PP_ERROR, "the model file is missing"))
#elif defined(FAULT_ERROR_TEXT)
INSTEAD(phase_b, pp_phase_b_args, memset(error->text, 'x', error->capacity); error->text[1] = '\n';
        error->length = UINT64_MAX; return 77)
#elif defined(FAULT_SELF_TEST)
static pp_status bad_self_test(pp_error *error) { return fail(error, PP_ERROR, "2 + 2 is 5"); }
TABLE(table->self_test = bad_self_test)
#elif defined(FAULT_NAME)
static pp_status bad_describe(pp_description *out, pp_error *error) {
  pp_status status = describe(out, error);
  memset(out->name, 'a', sizeof out->name);
  return status;
}
TABLE(table->describe = bad_describe)
#elif defined(NO_FAULT_CUDA) || defined(FAULT_CUDA_OF_1_0)
static pp_status claims_cuda(pp_description *out, pp_error *error) {
  pp_status status = describe(out, error);
  out->spaces |= 1u << PP_SPACE_CUDA;
  return status;
}
#if defined(FAULT_CUDA_OF_1_0)
TABLE(table->describe = claims_cuda, table->minor = 0)
#else
TABLE(table->describe = claims_cuda)
#endif
#elif defined(FAULT_NO_SESSION)
static pp_status no_session(const pp_session_config *config, pp_session **out, pp_error *error) {
  (void)config, (void)out, (void)error;
  return PP_OK;
}
TABLE(table->create = no_session)
#elif defined(FAULT_UNRESOLVED)
extern int a_symbol_that_is_nowhere(void);
TABLE(table->minor = (uint16_t)a_symbol_that_is_nowhere())
#elif defined(FAULT_NULL)
ENTRY(return NULL)
#elif defined(FAULT_MISALIGNED)
ENTRY(return (const pp_kernels_table *)((const char *)table + 1))
#elif defined(FAULT_MAGIC)
TABLE(table->magic += 1)
#elif defined(FAULT_MAJOR)
TABLE(table->major = 2, table->minor = 7)
#elif defined(FAULT_SHORT)
TABLE(table->struct_size = 40)
#elif defined(FAULT_MISSING)
TABLE(table->decode = NULL)
#elif defined(NO_FAULT_OLDER)
/* A host that read past the size would jump to address 8. */
TABLE(table->struct_size = sizeof *table - sizeof(void *), table->self_test = (pp_status(*)(pp_error *))8)
#elif defined(NO_FAULT_NEWER)
TABLE(table->struct_size = sizeof *table + 8 * sizeof(void *), table->minor = 9)
#elif !defined(FAULT_NO_ENTRY)
ENTRY(return table)
#endif

#if !defined(FAULT_NO_ENTRY)
const pp_kernels_table *pp_kernels_entry_v1(void) {
  static struct {
    pp_kernels_table table;
    void *more[8];
  } made;
  made.table = *sound_entry();
  return spoil(&made.table);
}
#endif
