/* The median plugin with a frame of context, sound or with one fault; built by the tests. */
#define pp_kernels_entry_v2 sound_entry
#include "../../../../plugins/median/median.c"
#undef pp_kernels_entry_v2

/* What is remembered of each session: the last frame that was sent, and the calls of phase_b. */
static struct memory {
  pp_session *session;
  uint16_t *sent;
  unsigned calls;
  uint64_t next; /* the number of the frame behind the last chunk */
  uint32_t steps;
} memories[64];

static struct memory *memory_of(pp_session *s) {
  for (int i = 0; i < 64; i++)
    if (memories[i].session == s) return &memories[i];
  return NULL;
}

static pp_status create_with_memory(const pp_session_config *config, pp_geometry *frames, pp_session **out, pp_error *error) {
  pp_status status = create(config, frames, out, error);
  if (status != PP_OK) return status;
  struct memory *m = memory_of(NULL);
  if (!m) return fail(error, PP_OUT_OF_MEMORY, "too many sessions");
  *m = (struct memory){*out, calloc((*out)->samples, 2), 0, 0, 0};
  return PP_OK;
}

static void destroy_with_memory(pp_session *s) {
  struct memory *m = memory_of(s);
  if (m) {
    free(m->sent);
    *m = (struct memory){0};
  }
  destroy(s);
}

static pp_status describe_context(pp_description *out, pp_error *error) {
  pp_status status = describe(out, error);
  out->context_frames = 1;
  return status;
}

static pp_status layout_context(pp_session *s, pp_layout_args *args, pp_error *error) {
  uint32_t context = args->context_frames;
  args->context_frames = 0;
  pp_status status = layout(s, args, error);
  args->context_frames = context;
  if (context && s->stage == ENCODE)
    describe_tensor(&args->outputs[args->output_count++], "context_frames", PP_DTYPE_BF16, 2, context, s->samples);
  if (context && s->stage == PHASE_B)
    describe_tensor(&args->inputs[args->input_count++], "context_frames", PP_DTYPE_BF16, 2, context, s->samples);
  return status;
}

static pp_status encode_context(pp_session *s, pp_run_args *args, pp_error *error) {
  struct memory *m = memory_of(s);
  pp_status status = encode(s, args, error);
  if (status != PP_OK) return status;
  uint16_t *context = find(args->output, "context_frames", s->samples * 2);
  if (context) memcpy(context, m->sent, s->samples * 2);
#if defined(FAULT_CONTEXT_FILTERED)
  if (context) context[0] ^= 1;
#endif
  uint64_t last = args->frame_count - 1;
#if defined(FAULT_CONTEXT_OTHER)
  last = 0;
#endif
  const uint16_t *latents = find(args->output, "latents_in", args->frame_count * s->samples * 2);
  memcpy(m->sent, latents + last * s->samples, s->samples * 2);
  return PP_OK;
}

static pp_status phase_b_context(pp_session *s, pp_run_args *args, pp_error *error) {
  pp_plan plan = *args->plan;
  const pp_plan *given = args->plan;
  if (plan.do_kv_recompute && !find(args->input, "context_frames", s->samples * 2))
    return fail(error, PP_INVALID_ARGUMENT, "context_frames is missing");
  plan.do_kv_recompute = 0;
  args->plan = &plan;
  pp_status status = phase_b(s, args, error);
  args->plan = given;
  if (status == PP_OK) args->observed_generator_calls = plan.num_denoise_steps + given->do_kv_recompute;
#if defined(FAULT_FALSE_GAPS) || defined(FAULT_LOST_IN_GAPS) || defined(FAULT_FALSE_STEPS)
  struct memory *m = memory_of(s);
  int goes_on = !plan.init_cache && !plan.reset_kv_cache, differs;
#if defined(FAULT_FALSE_GAPS)
  /* Takes the missing frames from what it saw, so a session that begins behind them knows of none. */
  differs = goes_on && plan.current_start_frame != m->next;
#elif defined(FAULT_LOST_IN_GAPS)
  /* Reads of the missing frames in a recompute alone. */
  differs = goes_on && given->do_kv_recompute && plan.skipped_frames;
#else
  differs = goes_on && m->steps != plan.num_denoise_steps;
#endif
  m->steps = plan.num_denoise_steps;
  m->next = plan.current_start_frame + frames_of(s, args->input);
  if (status == PP_OK && differs) args->output->data[0] ^= 1;
#endif
#if defined(FAULT_NO_RESET)
  /* Remembers what was before a cut. */
  if (plan.reset_kv_cache && memory_of(s)->calls++) args->output->data[0] ^= 1;
  memory_of(s)->calls++;
#endif
#if defined(FAULT_HIDDEN_STATE)
  /* Depends on how many chunks this session has seen, which no context tells. */
  if (status == PP_OK && plan.num_denoise_steps && memory_of(s)->calls++) args->output->data[0] ^= 1;
#endif
  return status;
}

static pp_status run_context(pp_session *s, pp_run_args *args, pp_error *error) {
  return s->stage == ENCODE    ? encode_context(s, args, error)
         : s->stage == PHASE_B ? phase_b_context(s, args, error)
                               : decode(s, args, error);
}

const pp_kernels_table *pp_kernels_entry_v2(void) {
  static pp_kernels_table table;
  table = *sound_entry();
  table.describe = describe_context;
  table.create = create_with_memory;
  table.destroy = destroy_with_memory;
  table.layout = layout_context;
  table.run = run_context;
  return &table;
}
