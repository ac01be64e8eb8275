/* Times calls of phase_b of the plugin aoti: each alone, with PyTorch's own function `Run` in it, and many in a row.
 *
 *   cc -O2 -rdynamic -I crates/pp-kernels/include -o pt2_host python/bench/pt2_host.c -ldl
 *   ./pt2_host libpp_aoti.so model.pt2 WIDTH HEIGHT FRAMES CALLS [cuda]
 *
 * The plugin finds `Run` by dlsym, which this program has its own of. A call alone begins on an idle stream. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pp_kernel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int (*run_function)(void *, void **, size_t, void **, size_t, void *, void *);
static run_function real_run;
static double in_run;

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1e6 + at.tv_nsec / 1e3;
}

static int timed_run(void *model, void **in, size_t ins, void **out, size_t outs, void *stream, void *proxy) {
  double begun = now();
  int code = real_run(model, in, ins, out, outs, stream, proxy);
  in_run += now() - begun;
  return code;
}

void *dlsym(void *library, const char *name) {
  static void *(*real)(void *, const char *);
  if (!real) real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  void *found = real(library, name);
  if (!found || strcmp(name, "AOTInductorModelContainerRunSingleThreaded")) return found;
  real_run = (run_function)found;
  return (void *)timed_run;
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void print(const char *what, double *times, int count) {
  qsort(times, count, sizeof *times, by_size);
  printf("%-40s %8.1f %8.1f %8.1f\n", what, times[count / 2], times[count * 9 / 10], times[count - 1]);
}

/* Functions of the driver. */
#define CUDA(name, ...)                                                                     \
  do {                                                                                      \
    int code = ((int (*)())dlsym(cuda, #name))(__VA_ARGS__);                                \
    if (code) return fprintf(stderr, #name ": %d\n", code), 1;                              \
  } while (0)

static uint64_t place(pp_tensor *tensors, uint32_t count) {
  uint64_t end = 0;
  const uint64_t sizes[] = {[PP_DTYPE_I64] = 8, [PP_DTYPE_BF16] = 2, [PP_DTYPE_F32] = 4};
  for (uint32_t at = 0; at < count; at++) {
    tensors[at].offset = (end + 255) / 256 * 256;
    tensors[at].bytes = sizes[tensors[at].dtype];
    for (uint32_t dim = 0; dim < tensors[at].ndim; dim++) tensors[at].bytes *= tensors[at].dims[dim];
    end = tensors[at].offset + tensors[at].bytes;
  }
  return (end + 255) / 256 * 256;
}

int main(int count, char **args) {
  if (count < 7) return fputs("pt2_host PLUGIN PACKAGE WIDTH HEIGHT FRAMES CALLS [cuda]\n", stderr), 2;
  int calls = atoi(args[6]), is_cuda = count > 7, device;
  void *plugin = dlopen(args[1], RTLD_NOW | RTLD_LOCAL), *cuda = NULL, *context = NULL, *stream = NULL;
  if (!plugin) return fprintf(stderr, "%s\n", dlerror()), 1;
  const pp_kernels_table *table = ((const pp_kernels_table *(*)(void))dlsym(plugin, "pp_kernels_entry_v2"))();
  if (is_cuda) {
    cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!cuda) return fprintf(stderr, "%s\n", dlerror()), 1;
    CUDA(cuInit, 0u);
    CUDA(cuDeviceGet, &device, 0);
    CUDA(cuDevicePrimaryCtxRetain, &context, device);
    CUDA(cuCtxSetCurrent, context);
    CUDA(cuStreamCreate, &stream, 1u);
  }
  uint8_t text[16384];
  pp_error error = {sizeof error, 0, text, sizeof text - 1, 0};
  pp_arg arg = {(const uint8_t *)"phase_b", (const uint8_t *)args[2]};
  pp_session_config config = {.struct_size = sizeof config, .space = is_cuda, .width = atoi(args[3]), .height = atoi(args[4]),
      .chroma = PP_CHROMA_420, .max_frames = atoi(args[5]), .noise_sigma = 20, .device = (uint64_t)context,
      .stream = (uint64_t)stream, .stage = 1, .parts = 1, .laps = 1, .members = 1, .arg_count = 1, .args = &arg};
  pp_geometry frames = {.struct_size = sizeof frames};
  pp_session *session;
  pp_tensor in[16], out[16];
  memset(in, 0, sizeof in), memset(out, 0, sizeof out);
  pp_layout_args layout = {.struct_size = sizeof layout, .frames = config.max_frames, .steps = 1, .capacity = 16, .inputs = in,
      .outputs = out};
  if (table->create(&config, &frames, &session, &error) || table->layout(session, &layout, &error))
    return fprintf(stderr, "%.*s\n", (int)error.length, text), 1;
  pp_payload given = {sizeof given, layout.input_count, in, NULL, place(in, layout.input_count)};
  pp_payload made = {sizeof made, layout.output_count, out, NULL, place(out, layout.output_count)};
  for (pp_payload *of = &given; of; of = of == &given ? &made : NULL) {
    if (!is_cuda) {
      of->data = aligned_alloc(256, of->bytes);
      memset(of->data, 0, of->bytes);
      continue;
    }
    CUDA(cuMemAlloc_v2, &of->data, of->bytes);
    CUDA(cuMemsetD8_v2, of->data, 0u, of->bytes);
  }
  pp_plan plan = {.struct_size = sizeof plan, .height = config.height, .width = config.width, .num_denoise_steps = 1,
      .expected_generator_calls = 1, .init_cache = 1, .kv_cache_attention_bias = -1};
  pp_run_args run = {.struct_size = sizeof run, .plan = &plan, .input = &given, .output = &made};
  double *whole = malloc(calls * sizeof *whole), *above = malloc(calls * sizeof *above);
  for (int call = -20; call < calls; call++) {
    in_run = 0;
    double begun = now();
    if (table->run(session, &run, &error)) return fprintf(stderr, "%.*s\n", (int)error.length, text), 1;
    double took = now() - begun;
    if (call >= 0) whole[call] = took, above[call] = took - in_run;
    if (is_cuda) CUDA(cuStreamSynchronize, stream);
  }
  double rows[5];
  for (int row = 0; row < 5; row++) {
    double begun = now();
    for (int call = 0; call < calls; call++)
      if (table->run(session, &run, &error)) return fprintf(stderr, "%.*s\n", (int)error.length, text), 1;
    if (is_cuda) CUDA(cuStreamSynchronize, stream);
    rows[row] = (now() - begun) / calls;
  }
  qsort(rows, 5, sizeof *rows, by_size);
  printf("%-40s %8s %8s %8s\n", "host time of a call, us", "median", "90 %", "worst");
  print("run of phase_b", whole, calls);
  print("above PyTorch's Run", above, calls);
  printf("package: %.3f ms a call, many in a row (median of 5 rows)\n", rows[2] / 1e3);
  fflush(stdout);
  _Exit(0);
}
