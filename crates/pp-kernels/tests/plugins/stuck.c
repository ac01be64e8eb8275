/* The median plugin as one whose encode fails on a device; with STUCK, behind work that does not end. Built by the tests. */
#define pp_kernels_entry_v2 sound_entry
#include "../../../../plugins/median/median.c"
#undef pp_kernels_entry_v2

static pp_status says_cuda(pp_description *out, pp_error *error) {
  pp_status status = describe(out, error);
  out->spaces |= 1u << PP_SPACE_CUDA;
  return status;
}

static uint64_t stream;

static pp_status takes_cuda(const pp_session_config *config, pp_geometry *frames, pp_session **out, pp_error *error) {
  pp_session_config host = *config;
  host.space = PP_SPACE_HOST;
  stream = config->stream;
  return create(&host, frames, out, error);
}

#if defined(STUCK)
#include <unistd.h>

/* The driver's. */
int cuLaunchHostFunc(void *stream, void (*call)(void *), void *data);

static void never_ends(void *data) {
  (void)data;
  for (;;) sleep(1000);
}
#endif

static pp_status encode_fails(pp_session *s, pp_run_args *args, pp_error *error) {
  if (s->stage != ENCODE) return run(s, args, error);
#if defined(STUCK)
  cuLaunchHostFunc((void *)(uintptr_t)stream, never_ends, NULL);
#endif
  return fail(error, PP_ERROR, "no encode today");
}

const pp_kernels_table *pp_kernels_entry_v2(void) {
  static pp_kernels_table table;
  table = *sound_entry();
  table.describe = says_cuda, table.create = takes_cuda, table.run = encode_fails;
  return &table;
}
