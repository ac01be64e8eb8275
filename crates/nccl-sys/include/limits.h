/* All that nccl.h needs of the C library, so that bindings do not depend on the machine's headers. */
#define INT_MIN (-__INT_MAX__ - 1)
