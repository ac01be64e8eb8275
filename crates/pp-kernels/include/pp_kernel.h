/*
 * pp_kernel.h: the C ABI between the pipeline runtime ("the host") and a set of kernels ("the plugin").
 *
 * A plugin is one shared library with one exported function, pp_kernels_entry_v2(), which returns a
 * table of functions. The plugin lists its stages: a source (frames to tensors), any number of middle
 * stages (tensors to tensors), a sink (tensors to frames). A session runs one stage of one stream.
 * docs/plugin-abi.md explains the life cycle; this file is the whole of the ABI.
 *
 * Rules that hold everywhere
 *   - Structs start with struct_size, filled by the caller with sizeof as the caller knows it. Structs only grow
 *     at the end. A callee reads no field that lies beyond struct_size. pp_stage, pp_arg, pp_tensor, pp_plane and
 *     pp_frame travel in arrays, so they have no size field and never change within major version 2.
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

#define PP_KERNELS_MAGIC 0x32534C4E524B5050ull /* the bytes "PPKRNLS2" */
#define PP_KERNELS_MAJOR 2u /* another major version is refused */
#define PP_KERNELS_MINOR 4u /* raised when an entry, a field or a value is appended, or what was open is settled */

#define PP_MAX_STAGES 16u
#define PP_MAX_TENSORS 16u
#define PP_MAX_CONTEXT_GAPS 8u /* 2.4 */
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
 * PP_SPACE_CUDA:
 *   - pp_payload.data is a device address in the context pp_session_config.device; the host never reads through it.
 *     Frames, and all structs, lie in host memory; the samples of frames should be page-locked.
 *   - The context is current on the thread that calls an entry, create and destroy included. The plugin leaves it so.
 *   - run enqueues work on pp_session_config.stream, and returns. It does not wait for it, and allocates nothing.
 *     Work that a plugin puts on streams of its own is joined to that stream by events.
 *   - What happens to bytes happens in the order of that stream. The host keeps payloads and samples allocated, and
 *     does not touch them, until the stream has passed the call. Structs, tensors and planes are valid for the call
 *     only, as ever: the plugin copies what it needs later.
 *   - observed_generator_calls is the number of calls enqueued, known when run returns.
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
/* Since minor version 3 */
#define PP_DTYPE_BOOL 6u
#define PP_DTYPE_I8 7u
#define PP_DTYPE_I16 8u
#define PP_DTYPE_U16 9u
#define PP_DTYPE_U32 10u
#define PP_DTYPE_F64 11u
#define PP_DTYPE_F8E4M3FN 12u
#define PP_DTYPE_F8E5M2 13u

/* Owned by the caller. The callee writes at most `capacity` bytes of UTF-8 (no NUL needed) and sets `length`. The host gives
   16,384 bytes. The first line stands in the line that says why the job ended; more lines, such as a backtrace, stand below it. */
typedef struct pp_error {
  uint32_t struct_size;
  uint32_t reserved;
  uint8_t *text;
  uint64_t capacity;
  uint64_t length;
} pp_error;

/* pp_stage.kind: the first stage is the one source, the last one the one sink */
#define PP_STAGE_SOURCE 0u /* frames in, tensors out */
#define PP_STAGE_MIDDLE 1u /* tensors in, tensors out */
#define PP_STAGE_SINK 2u   /* tensors in, frames out */

/* pp_stage.flags. The first four are for middle stages only, the others for any. A host refuses a flag that it does not know. */
#define PP_STAGE_PARTS 1u /* its passes can be cut into parts: part i of n runs as a stage of its own */
#define PP_STAGE_GROUP 2u /* several members can run it together, with the collectives of pp_group */
#define PP_STAGE_RING 4u  /* a chunk can come by several times; each lap runs its share of the passes */
#define PP_STAGE_NO_MEMORY 8u /* 2.1: a chunk's result depends on that chunk alone, so the stage needs no context_frames */
#define PP_STAGE_SAME_BYTES 16u /* 2.2: it gives the same bytes in host memory and in GPU memory */
#define PP_STAGE_GAPS 32u /* 2.4: frames may be missing between chunks; it reads skipped_frames, if it remembers frames */
#define PP_STAGE_STEPS 64u /* 2.4: num_denoise_steps may differ from chunk to chunk */

typedef struct pp_stage {
  uint8_t name[48]; /* a to z, 0 to 9, _ and -; ends with a NUL; no two stages have the same */
  uint32_t kind;
  uint32_t flags;
} pp_stage;

/* What the plugin is. The caller zeroes it, and sets struct_size, stage_capacity and stages; the texts end with a NUL. */
typedef struct pp_description {
  uint32_t struct_size;
  uint32_t spaces;         /* bits: where payloads may lie */
  uint32_t chroma_formats; /* bits: what its source takes */
  uint32_t context_frames; /* most frames of earlier chunks that a middle stage looks at */
  uint64_t digest;         /* changes when results may change: weights, formula, settings */
  uint8_t name[64];
  uint8_t version[32];
  uint32_t stage_capacity; /* of the array, PP_MAX_STAGES or more */
  uint32_t stage_count;    /* out */
  pp_stage *stages;        /* in the order of the pipeline */
  uint32_t bits;           /* 2.4: most bits of a sample that it takes, 8 or 10; 0: 8. Every plugin takes 8 */
  uint32_t reserved;
} pp_description;

/* A pair of the user's, from --plugin-arg KEY=VALUE. Both texts end with a NUL. */
typedef struct pp_arg {
  const uint8_t *key;
  const uint8_t *value;
} pp_arg;

typedef struct pp_session_config {
  uint32_t struct_size;
  uint32_t space;
  uint32_t width; /* of the luma plane of the source's frames, >= 16 */
  uint32_t height;
  uint32_t chroma;     /* of the source's frames */
  uint32_t max_frames; /* most of the source's frames in one chunk */
  uint32_t threads;    /* most threads a call may use; 0: as many as the machine has */
  float noise_sigma;   /* noise of the clip in 8-bit sample values (0 to 255), whatever `bits` is; negative: estimate it */
  uint64_t device;     /* PP_SPACE_CUDA: CUcontext; else 0 */
  uint64_t stream;     /* PP_SPACE_CUDA: CUstream of it that orders the work; else 0 */
  uint32_t stage;      /* its number in the description */
  uint32_t part;       /* which part of the stage, from 0 on */
  uint32_t parts;      /* 1, unless PP_STAGE_PARTS is set */
  uint32_t laps;       /* how often a chunk comes by; 1, unless PP_STAGE_RING is set */
  uint32_t member;     /* which member of the group, from 0 on */
  uint32_t members;    /* 1, unless PP_STAGE_GROUP is set */
  uint32_t arg_count;
  uint32_t bits;      /* 2.4: of a sample of the source's frames, at most pp_description.bits; 0: 8 */
  const pp_arg *args; /* the user's, the same for all stages; a key that the plugin does not know is refused by name */
} pp_session_config;

/* Frames of a stage. The host fills it with what the source takes, and one frame for each; a sink changes it where its
 * frames differ. */
typedef struct pp_geometry {
  uint32_t struct_size;
  uint32_t width;
  uint32_t height;
  uint32_t chroma;
  uint32_t frames_per_frame; /* frames that a sink gives for each frame of the source, at least 1 */
  uint32_t bits;             /* 2.4: of a sample, 8 or 10; 0: 8 */
} pp_geometry;

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
  uint32_t skipped_frames; /* 2.4: frames missing between the chunk before and this one; 0 without PP_STAGE_GAPS */
  uint64_t current_start_frame; /* counted over all frames of the stream, also those that are missing */
  uint64_t base_seed;
  uint32_t context_skipped[PP_MAX_CONTEXT_GAPS]; /* 2.4: frames missing in front of each frame before the chunk, newest first */
} pp_plan;

/* One tensor of a payload, row-major. The name is of a to z, 0 to 9, _ and ., and ends with a NUL. `offset` and `bytes`
 * are filled by the host. */
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

/* One plane of samples in host memory; row y starts at data + y * stride bytes. A sample of more than 8 bits is two bytes,
 * the lower one first, and begins at an even address; its upper bits are 0. */
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

/* The plugin fills name, dtype, ndim and dims of the first *_count tensors. The outputs of a stage, part and lap are the
 * inputs of the next one. */
typedef struct pp_layout_args {
  uint32_t struct_size;
  uint32_t frames;         /* of the source, in this chunk */
  uint32_t steps;          /* plan: num_denoise_steps, of all parts and laps together */
  uint32_t context_frames; /* frames in the tensor context_frames; 0: no recompute, no such tensor */
  uint32_t lap;            /* from 0 on */
  uint32_t capacity;       /* of each of the two arrays */
  uint32_t input_count;    /* out; 0 of a source */
  uint32_t output_count;   /* out; 0 of a sink */
  pp_tensor *inputs;
  pp_tensor *outputs;
} pp_layout_args;

/*
 * The collectives of a group, for members 0 to pp_session_config.members - 1. All members call the same functions in the
 * same order. Addresses are of the session's space; on PP_SPACE_CUDA a call enqueues on the session's stream and returns.
 * The first argument of each is `context`. Ranges of one call do not overlap.
 */
typedef struct pp_group {
  uint32_t struct_size;
  uint32_t reserved;
  void *context;
  /* `bytes` bytes of member `root` to all. */
  pp_status (*broadcast)(void *context, uint8_t *data, uint64_t bytes, uint32_t root, pp_error *error);
  /* Part i of `from`, bytes[i] long, the parts one behind the other, goes from `root` to `to` of member i. Only `root`
   * needs `from`. `bytes` has an element for each member, and is the same for all. */
  pp_status (*scatter)(void *context, const uint8_t *from, const uint64_t *bytes, uint8_t *to, uint32_t root,
                       pp_error *error);
  /* The other way round: bytes[i] bytes at `from` of member i become part i of `to`, which only `root` needs. */
  pp_status (*gather)(void *context, const uint8_t *from, const uint64_t *bytes, uint8_t *to, uint32_t root,
                      pp_error *error);
  /* `count` elements of `dtype` (PP_DTYPE_I32, I64, BF16, F16 or F32; others are refused) become their sums over all
   * members, in place, in the same order for all members. */
  pp_status (*all_reduce_sum)(void *context, uint8_t *data, uint64_t count, uint32_t dtype, pp_error *error);
  pp_status (*send)(void *context, const uint8_t *from, uint64_t bytes, uint32_t to, pp_error *error);
  pp_status (*receive)(void *context, uint8_t *to, uint64_t bytes, uint32_t from, pp_error *error);
  /* Nothing behind it begins before all members have come to it. */
  pp_status (*barrier)(void *context, pp_error *error);
} pp_group;

/* One chunk through one stage. Member 0 of a group has the payloads. The others have the same lists of tensors, with
 * `data` null and `bytes` 0, and get and give what they need through the collectives. */
typedef struct pp_run_args {
  uint32_t struct_size;
  uint32_t lap;                      /* from 0 on */
  uint32_t frame_count;              /* in `frames` */
  uint32_t observed_generator_calls; /* out, of a middle stage: the passes it ran, and one more if it rebuilt its cache */
  const pp_plan *plan;
  const pp_frame *frames;   /* source: read only; sink: the samples are written; middle: null */
  const pp_payload *input;  /* read only; source: null */
  const pp_payload *output; /* written, every byte of every tensor; sink: null */
  const pp_group *group;    /* null when pp_session_config.members is 1 */
} pp_run_args;

typedef struct pp_session pp_session; /* the plugin's own */

/* The table. A null entry means "not implemented"; only self_test may be null in version 2.0. */
typedef struct pp_kernels_table {
  uint64_t magic;
  uint32_t struct_size;
  uint16_t major;
  uint16_t minor;
  pp_status (*describe)(pp_description *out, pp_error *error);
  pp_status (*create)(const pp_session_config *config, pp_geometry *frames, pp_session **out, pp_error *error);
  void (*destroy)(pp_session *session); /* null is allowed and does nothing */
  pp_status (*layout)(pp_session *session, pp_layout_args *args, pp_error *error);
  pp_status (*run)(pp_session *session, pp_run_args *args, pp_error *error);
  pp_status (*self_test)(pp_error *error);
} pp_kernels_table;

#if defined(_WIN32)
#define PP_EXPORT __declspec(dllexport)
#else
#define PP_EXPORT __attribute__((visibility("default")))
#endif

/* The one exported symbol. The table must live as long as the library; the host never unloads it. */
PP_EXPORT const pp_kernels_table *pp_kernels_entry_v2(void);

#ifdef __cplusplus
}
#endif
#endif
