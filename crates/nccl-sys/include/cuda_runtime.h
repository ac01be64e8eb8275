/* All that nccl.h needs of CUDA, so that bindings are generated without a toolkit. */
typedef __SIZE_TYPE__ size_t;
typedef struct CUstream_st *cudaStream_t;
#define NULL ((void *)0)
