/*
 * pp_kernel.h: the C ABI between the pipeline runtime ("the host") and a set of kernels ("the plugin").
 *
 * A plugin is one shared library with one exported function, pp_kernels_entry_v1(), which returns a
 * table of functions. docs/plugin-abi.md explains the life cycle; this file is the whole of the ABI.
 *
 * Rules that hold everywhere
 *   - Structs start with struct_size, filled by the caller with sizeof as the caller knows it. Structs only grow
 *     at the end. A callee reads no field that lies beyond struct_size. pp_tensor, pp_plane and
 *     pp_frame travel in arrays, so they have no size field and never change within major version 1.
 *   - Only integers of fixed width, float and pointers cross. Booleans are uint32_t, 0 or 1.
 *   - Nothing is allocated on one side and freed on the other. A pointer in an argument is valid for the call only.
 *   - A function returns a pp_status. When it is not PP_OK it writes a text into the pp_error of the caller.
 *   - No exception or panic leaves a function.
 *   - Calls on one session never overlap, but they may come from different threads, one after the other.
 *     Different sessions may be called at the same time.
 */
#ifndef PP_KERNEL_H
#define PP_KERNEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PP_KERNELS_MAGIC 0x31534C4E524B5050ull /* the bytes "PPKRNLS1" */
#define PP_KERNELS_MAJOR 1u /* another major version is refused */
#define PP_KERNELS_MINOR 1u /* raised when an entry or a field is appended, or what was open is settled */

#define PP_MAX_TENSORS 16u
#define PP_TENSOR_ALIGN 256u

typedef uint32_t pp_status;
#define PP_OK 0u
#define PP_ERROR 1u            /* anything else */
#define PP_INVALID_ARGUMENT 2u /* the caller's fault; the session stays usable */
#define PP_UNSUPPORTED 3u      /* understood, but not something these kernels do */
#define PP_OUT_OF_MEMORY 4u
#define PP_PANIC 5u /* a panic was stopped at the border; the session must only be destroyed */

/*
 * pp_session_config.space, and bits (1 << space) of pp_description.spaces.
 *
 * PP_SPACE_HOST: everything lies in host memory, and a call has done its work when it returns.
 *
 * PP_SPACE_CUDA, since version 1.1 (a plugin of 1.0 gets host sessions only):
 *   - pp_payload.data is a device address in the context pp_session_config.device; the host never reads through it.
 *     Frames, and all structs, lie in host memory; the samples of frames should be page-locked.
 *   - The context is current on the thread that calls an entry, create and destroy included. The plugin leaves it so.
 *   - encode, phase_b and decode enqueue work on pp_session_config.stream, and return. They do not wait for it, and
 *     allocate nothing. Work that a plugin puts on streams of its own is joined to that stream by events.
 *   - What happens to bytes happens in the order of that stream. The host keeps payloads and samples allocated, and
 *     does not touch them, until the stream has passed the call. Structs, tensors and planes are valid for the call
 *     only, as ever: the plugin copies what it needs later.
 *   - observed_generator_calls is the number of calls enqueued, known when phase_b returns.
 *   - A failure of work that is already enqueued shows in a later call, or where the host waits for the stream.
 *   - create may wait (for a compiler, or an allocation). destroy may wait for the stream, but not for ever: what a
 *     stream that hangs may still touch is leaked.
 */
#define PP_SPACE_HOST 0u
#define PP_SPACE_CUDA 1u

/* pp_session_config.chroma, and bits (1 << chroma) of pp_description.chroma_formats */
#define PP_CHROMA_MONO 0u
#define PP_CHROMA_420 1u
#define PP_CHROMA_422 2u
#define PP_CHROMA_444 3u

/* pp_tensor.dtype */
#define PP_DTYPE_U8 0u
#define PP_DTYPE_I32 1u
#define PP_DTYPE_I64 2u
#define PP_DTYPE_BF16 3u
#define PP_DTYPE_F16 4u
#define PP_DTYPE_F32 5u

/* Owned by the caller. The callee writes at most `capacity` bytes of UTF-8 (no NUL needed) and sets `length`. */
typedef struct pp_error {
  uint32_t struct_size;
  uint32_t reserved;
  uint8_t *text;
  uint64_t capacity;
  uint64_t length;
} pp_error;

/* What the plugin is. The caller zeroes it and sets struct_size; the texts end with a NUL. */
typedef struct pp_description {
  uint32_t struct_size;
  uint32_t spaces;         /* bits: where payloads may lie */
  uint32_t chroma_formats; /* bits */
  uint32_t context_frames; /* most frames of earlier chunks that phase_b looks at */
  uint64_t digest;         /* changes when results may change: weights, formula, settings */
  uint8_t name[64];
  uint8_t version[32];
} pp_description;

typedef struct pp_session_config {
  uint32_t struct_size;
  uint32_t space;
  uint32_t width; /* of the luma plane, >= 16 */
  uint32_t height;
  uint32_t chroma;
  uint32_t max_frames; /* most frames in one chunk */
  uint32_t threads;    /* most threads a call may use; 0: as many as the machine has */
  float noise_sigma;   /* noise of the clip in 8-bit sample values (0 to 255); negative: estimate it from the frames */
  uint64_t device;     /* PP_SPACE_CUDA: CUcontext; else 0 */
  uint64_t stream;     /* PP_SPACE_CUDA: CUstream of it that orders the work; else 0 */
} pp_session_config;

/* The plan of one chunk, as it travels in the envelope. */
typedef struct pp_plan {
  uint32_t struct_size;
  uint32_t height;
  uint32_t width;
  uint32_t num_denoise_steps;
  uint32_t expected_generator_calls; /* num_denoise_steps + do_kv_recompute */
  uint32_t do_kv_recompute;
  uint32_t init_cache;
  uint32_t reset_kv_cache;
  uint32_t reset_crossattn_cache;
  float kv_cache_attention_bias;
  float noise_scale;
  uint32_t reserved;
  uint64_t current_start_frame;
  uint64_t base_seed;
} pp_plan;

/* One tensor of a payload, row-major. The name ends with a NUL. `offset` and `bytes` are filled by the host. */
typedef struct pp_tensor {
  uint8_t name[48];
  uint32_t dtype;
  uint32_t ndim;
  uint64_t dims[8];
  uint64_t offset; /* from pp_payload.data, a multiple of PP_TENSOR_ALIGN */
  uint64_t bytes;
} pp_tensor;

/* The tensors of one direction, in memory of the session's space. */
typedef struct pp_payload {
  uint32_t struct_size;
  uint32_t tensor_count;
  const pp_tensor *tensors;
  uint8_t *data; /* aligned to PP_TENSOR_ALIGN; a device address in a session on PP_SPACE_CUDA */
  uint64_t bytes;
} pp_payload;

/* One plane of 8-bit samples in host memory; row y starts at data + y * stride. */
typedef struct pp_plane {
  uint8_t *data;
  uint64_t stride;
  uint32_t width;
  uint32_t height;
} pp_plane;

/* Luma and, unless the session is mono, two chroma planes; planes that are not there are all zero. */
typedef struct pp_frame {
  pp_plane planes[3];
} pp_frame;

/* The plugin fills name, dtype, ndim and dims of the first *_count tensors. */
typedef struct pp_layout_args {
  uint32_t struct_size;
  uint32_t frames;         /* in this chunk */
  uint32_t steps;          /* plan: num_denoise_steps */
  uint32_t context_frames; /* frames in the tensor context_frames; 0: no recompute, no such tensor */
  uint32_t capacity;       /* of each of the two arrays */
  uint32_t input_count;    /* out */
  uint32_t output_count;   /* out */
  uint32_t reserved;
  pp_tensor *inputs;
  pp_tensor *outputs;
} pp_layout_args;

typedef struct pp_encode_args {
  uint32_t struct_size;
  uint32_t frame_count;
  const pp_plan *plan;
  const pp_frame *frames;  /* read only */
  const pp_payload *input; /* written: the input tensors of phase_b */
} pp_encode_args;

typedef struct pp_phase_b_args {
  uint32_t struct_size;
  uint32_t observed_generator_calls; /* out */
  const pp_plan *plan;
  const pp_payload *input;  /* read only */
  const pp_payload *output; /* written */
} pp_phase_b_args;

typedef struct pp_decode_args {
  uint32_t struct_size;
  uint32_t frame_count;
  const pp_plan *plan;
  const pp_payload *output; /* read only: the output tensors of phase_b */
  const pp_frame *frames;   /* the samples are written */
} pp_decode_args;

typedef struct pp_session pp_session; /* the plugin's own */

/* The table. A null entry means "not implemented"; only self_test may be null in version 1.0. */
typedef struct pp_kernels_table {
  uint64_t magic;
  uint32_t struct_size;
  uint16_t major;
  uint16_t minor;
  pp_status (*describe)(pp_description *out, pp_error *error);
  pp_status (*create)(const pp_session_config *config, pp_session **out, pp_error *error);
  void (*destroy)(pp_session *session); /* null is allowed and does nothing */
  pp_status (*layout)(pp_session *session, pp_layout_args *args, pp_error *error);
  pp_status (*encode)(pp_session *session, pp_encode_args *args, pp_error *error);
  pp_status (*phase_b)(pp_session *session, pp_phase_b_args *args, pp_error *error);
  pp_status (*decode)(pp_session *session, pp_decode_args *args, pp_error *error);
  pp_status (*self_test)(pp_error *error);
} pp_kernels_table;

#if defined(_WIN32)
#define PP_EXPORT __declspec(dllexport)
#else
#define PP_EXPORT __attribute__((visibility("default")))
#endif

/* The one exported symbol. The table must live as long as the library; the host never unloads it. */
PP_EXPORT const pp_kernels_table *pp_kernels_entry_v1(void);

#ifdef __cplusplus
}
#endif
#endif
