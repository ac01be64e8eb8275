/* The median plugin with one fault, chosen by FAULT_x; built by the tests. */
#define pp_kernels_entry_v2 sound_entry
#include "../../../../plugins/median/median.c"
#undef pp_kernels_entry_v2

#include <stdio.h>
#include <unistd.h>

/* Each fault defines `spoil`, which changes a copy of the sound table and gives what the entry returns. */
#define ENTRY(...)                                                    \
  static const pp_kernels_table *spoil(pp_kernels_table *table) {     \
    (void)table;                                                      \
    __VA_ARGS__;                                                      \
  }
#define TABLE(...) ENTRY(__VA_ARGS__; return table)
/* The layout, or a stage, does something else. */
#define INSTEAD_OF_LAYOUT(...)                                                       \
  static pp_status at_fault(pp_session *s, pp_layout_args *args, pp_error *error) {  \
    __VA_ARGS__;                                                                     \
  }                                                                                  \
  TABLE(table->layout = at_fault)
#define INSTEAD(STAGE, ...)                                                          \
  static pp_status at_fault(pp_session *s, pp_run_args *args, pp_error *error) {     \
    if (s->stage != STAGE) return run(s, args, error);                               \
    __VA_ARGS__;                                                                     \
  }                                                                                  \
  TABLE(table->run = at_fault)
/* They do what they should, and then something else. */
#define AFTER_LAYOUT(STAGE, ...) \
  INSTEAD_OF_LAYOUT(pp_status status = layout(s, args, error); if (s->stage == STAGE) { __VA_ARGS__; } return status)
#define AFTER(STAGE, ...) INSTEAD(STAGE, pp_status status = run(s, args, error); __VA_ARGS__; return status)
/* A call that does not come back from chunks of no steps. */
#define NEVER_RETURNS(...)                                                                     \
  INSTEAD(PHASE_B, if (args->plan->num_denoise_steps) return phase_b(s, args, error); \
          __VA_ARGS__; for (;;) pause())
/* A description that is not what it should be. */
#define DESCRIBES(...)                                                               \
  static pp_status bad_describe(pp_description *out, pp_error *error) {              \
    pp_status status = describe(out, error);                                         \
    __VA_ARGS__;                                                                     \
    return status;                                                                   \
  }                                                                                  \
  TABLE(table->describe = bad_describe)
/* A session that is made in another way. */
#define CREATES(...)                                                                                     \
  static pp_status bad_create(const pp_session_config *config, pp_geometry *frames, pp_session **out,    \
                              pp_error *error) {                                                         \
    (void)config, (void)frames, (void)out, (void)error;                                                  \
    __VA_ARGS__;                                                                                         \
  }                                                                                                      \
  TABLE(table->create = bad_create)

#ifdef FAULT_JUNK
enum { EXITS = 1 };
#else
enum { EXITS = 0 };
#endif

#if defined(FAULT_CRASH)
NEVER_RETURNS(volatile int *volatile nowhere = NULL; *nowhere = 1)
#elif defined(FAULT_EXIT)
NEVER_RETURNS(puts("the plugin says good-bye"); exit(3))
#elif defined(FAULT_LATER_CRASH)
INSTEAD(PHASE_B, if (args->plan->current_start_frame > 8) *(volatile int *volatile)NULL = 1; return phase_b(s, args, error))
#elif defined(FAULT_LATER_EXIT)
INSTEAD(PHASE_B, if (args->plan->current_start_frame > 8) exit(3); return phase_b(s, args, error))
#elif defined(FAULT_JUNK) || defined(NO_FAULT_JUNK)
INSTEAD(ENCODE, char junk[64]; memset(junk, 0xff, sizeof junk); const char *fd = getenv("PP_REPORT_FD");
        int failed = fd && write(atoi(fd), junk, sizeof junk) < 0;
        if (fd && EXITS) exit(failed); return run(s, args, error))
#elif defined(FAULT_HANG)
NEVER_RETURNS()
#elif defined(FAULT_AT_EXIT)
TABLE(atexit(abort))
#elif defined(FAULT_TRUSTS)
INSTEAD(PHASE_B, if (!args->input->bytes) abort(); return phase_b(s, args, error))
#elif defined(FAULT_CONSTRUCTOR)
__attribute__((constructor)) static void begin(void) { abort(); }
ENTRY(return table)
#elif defined(FAULT_OVERRUN)
AFTER(PHASE_B, args->output->data[args->output->bytes] ^= 1)
#elif defined(FAULT_FAR_OVERRUN)
AFTER(PHASE_B, memset(args->output->data + args->output->bytes, 1, 4000))
#elif defined(FAULT_STRIDE)
static pp_status at_fault(pp_session *s, pp_run_args *args, pp_error *error) {
  pp_frame frames[3];
  for (uint32_t f = 0; f < args->frame_count; f++) {
    frames[f] = args->frames[f];
    for (int p = 0; p < 3; p++) frames[f].planes[p].stride = frames[f].planes[p].width;
  }
  args->frames = frames;
  return run(s, args, error);
}
TABLE(table->run = at_fault)
#elif defined(FAULT_FORGETS)
/* The last byte of the output stays what it was. */
INSTEAD(PHASE_B, const pp_tensor *t = &args->output->tensors[0]; uint8_t *last = args->output->data + t->offset + t->bytes - 1;
        uint8_t was = *last; pp_status status = phase_b(s, args, error); *last = was; return status)
#elif defined(FAULT_LEAK)
static void keep(pp_session *s) { (void)s; }
TABLE(table->destroy = keep)
#elif defined(FAULT_ARGS)
CREATES(pp_session_config without = *config; without.arg_count = 0; return create(&without, frames, out, error))
#elif defined(FAULT_GAP)
AFTER(ENCODE, const pp_tensor *t = &args->output->tensors[1]; args->output->data[t->offset + t->bytes] = 1)
#elif defined(FAULT_CALLS)
AFTER(PHASE_B, args->observed_generator_calls = 0)
#elif defined(NO_FAULT_PRINTS)
static void says(void) { puts("the plugin prints"), fflush(stdout); }
__attribute__((constructor)) static void begin(void) { says(); }
AFTER(DECODE, says())
#elif defined(FAULT_WRITES_INPUT)
AFTER(PHASE_B, args->input->data[0] ^= 1)
#elif defined(FAULT_IDENTITY)
AFTER(DECODE, args->frames[0].planes[0].data[0] ^= 1)
#elif defined(FAULT_LAYOUT_COUNT)
AFTER_LAYOUT(PHASE_B, args->input_count = 17)
#elif defined(FAULT_LAYOUT_DTYPE)
AFTER_LAYOUT(PHASE_B, args->inputs[0].dtype = 99)
#elif defined(FAULT_LAYOUT_SIZE)
AFTER_LAYOUT(PHASE_B, args->outputs[0].dims[0] = UINT64_MAX / 2)
#elif defined(FAULT_LAYOUT_NAME)
AFTER_LAYOUT(PHASE_B, memset(args->inputs[0].name, 'a', sizeof args->inputs[0].name))
#elif defined(FAULT_LAYOUT_CHAIN)
AFTER_LAYOUT(PHASE_B, args->inputs[0].name[0] = 'k')
#elif defined(FAULT_LAYOUT_SOURCE)
AFTER_LAYOUT(ENCODE, describe_tensor(&args->inputs[0], "samples", PP_DTYPE_U8, 1, 1, 0); args->input_count = 1)
#elif defined(FAULT_ERROR)
INSTEAD(PHASE_B, return fail(error, PP_ERROR, "the model file is missing"))
#elif defined(FAULT_ERROR_TEXT)
INSTEAD(PHASE_B, memset(error->text, 'x', error->capacity); error->text[1] = '\n';
        error->length = UINT64_MAX; return 77)
#elif defined(FAULT_SELF_TEST)
static pp_status bad_self_test(pp_error *error) { return fail(error, PP_ERROR, "2 + 2 is 5"); }
TABLE(table->self_test = bad_self_test)
#elif defined(FAULT_NAME)
DESCRIBES(memset(out->name, 'a', sizeof out->name))
#elif defined(FAULT_STAGE_COUNT)
DESCRIBES(out->stage_count = 17)
#elif defined(FAULT_STAGE_ORDER)
DESCRIBES(out->stages[0].kind = PP_STAGE_MIDDLE)
#elif defined(FAULT_STAGE_NAME)
DESCRIBES(memset(out->stages[1].name, 'a', sizeof out->stages[1].name))
#elif defined(FAULT_STAGE_TWICE)
DESCRIBES(out->stages[1] = out->stages[0]; out->stages[1].kind = PP_STAGE_MIDDLE)
#elif defined(FAULT_STAGE_KIND)
DESCRIBES(out->stages[1].kind = 9)
#elif defined(FAULT_STAGE_FLAGS)
DESCRIBES(out->stages[0].flags = PP_STAGE_PARTS)
#elif defined(FAULT_FALSE_FLAGS)
/* It says that it can be cut, and runs all passes in each part. */
DESCRIBES(out->stages[1].flags = PP_STAGE_PARTS)
#elif defined(FAULT_NO_CONTEXT) || defined(NO_FAULT_NO_MEMORY)
/* It rebuilds without a context, and says with a flag that there is nothing to rebuild, or does not. */
static pp_status from_nothing(pp_session *s, pp_run_args *args, pp_error *error) {
  const pp_plan *given = args->plan;
  pp_plan plan = *given;
  plan.do_kv_recompute = 0, args->plan = &plan;
  pp_status status = run(s, args, error);
  args->plan = given, args->observed_generator_calls += given->do_kv_recompute;
  return status;
}
static pp_status flagged(pp_description *out, pp_error *error) {
  pp_status status = describe(out, error);
#if defined(NO_FAULT_NO_MEMORY)
  out->stages[1].flags = PP_STAGE_NO_MEMORY;
#endif
  return status;
}
TABLE(table->run = from_nothing, table->describe = flagged)
#elif defined(NO_FAULT_CUDA)
DESCRIBES(out->spaces |= 1u << PP_SPACE_CUDA)
#elif defined(FAULT_TEN_BITS)
DESCRIBES(out->bits = 10)
#elif defined(FAULT_NO_SESSION)
CREATES(return PP_OK)
#elif defined(FAULT_GEOMETRY)
CREATES(if (config->stage == DECODE) frames->width = 0; return create(config, frames, out, error))
#elif defined(NO_FAULT_SMALLER)
/* Its sink gives grey frames of half the size. */
static pp_status grey(pp_session *s, pp_run_args *args, pp_error *error) {
  if (s->stage != DECODE) return run(s, args, error);
  if (!args->input->tensor_count) return fail(error, PP_INVALID_ARGUMENT, "latents_out is missing");
  for (uint32_t f = 0; f < args->frame_count; f++)
    for (uint32_t p = 0; p < s->planes; p++) {
      const pp_plane *plane = &args->frames[f].planes[p];
      for (uint32_t y = 0; y < plane->height; y++) memset(plane->data + y * plane->stride, 128, plane->width);
    }
  return PP_OK;
}
static pp_status halves(const pp_session_config *config, pp_geometry *frames, pp_session **out, pp_error *error) {
  if (config->stage == DECODE) frames->width /= 2, frames->height /= 2;
  return create(config, frames, out, error);
}
TABLE(table->run = grey, table->create = halves)
#elif defined(NO_FAULT_PICKY)
/* It needs an argument, with which it takes frames of one size alone, and those in host memory. */
static pp_status both_memories(pp_description *out, pp_error *error) {
  pp_status status = describe(out, error);
  out->spaces |= 1u << PP_SPACE_CUDA;
  return status;
}
static pp_status picky(const pp_session_config *config, pp_geometry *frames, pp_session **out, pp_error *error) {
  if (!config->arg_count || strcmp((const char *)config->args[0].key, "weights"))
    return fail(error, PP_INVALID_ARGUMENT, "give --plugin-arg weights=FILE");
  if (config->width != 200 || config->height != 100) return fail(error, PP_UNSUPPORTED, "frames have 200x100 samples");
  pp_session_config rest = *config;
  rest.args++;
  rest.arg_count--;
  return create(&rest, frames, out, error);
}
TABLE(table->describe = both_memories, table->create = picky)
#elif defined(FAULT_GEOMETRY_OF_SOURCE)
CREATES(if (config->stage == ENCODE) frames->width *= 2; return create(config, frames, out, error))
#elif defined(FAULT_GEOMETRY_RATE)
CREATES(if (config->stage == DECODE) frames->frames_per_frame = 0; return create(config, frames, out, error))
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
TABLE(table->major = 3, table->minor = 7)
#elif defined(FAULT_SHORT)
TABLE(table->struct_size = 40)
#elif defined(FAULT_MISSING)
TABLE(table->run = NULL)
#elif defined(NO_FAULT_OLDER)
/* A host that read past the size would jump to address 8. */
TABLE(table->struct_size = sizeof *table - sizeof(void *), table->self_test = (pp_status(*)(pp_error *))8)
#elif defined(NO_FAULT_NEWER)
TABLE(table->struct_size = sizeof *table + 8 * sizeof(void *), table->minor = 9)
#elif !defined(FAULT_NO_ENTRY)
ENTRY(return table)
#endif

#if !defined(FAULT_NO_ENTRY)
const pp_kernels_table *pp_kernels_entry_v2(void) {
  static struct {
    pp_kernels_table table;
    void *more[8];
  } made;
  made.table = *sound_entry();
  return spoil(&made.table);
}
#endif
