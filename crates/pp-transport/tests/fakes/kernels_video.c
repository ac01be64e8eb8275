/* The kernels of pp-kernels that a run of zero steps needs. */
#include "fake.h"

const struct kernel *fake_video_kernel(const char *name);
const struct kernel *fake_video_kernel(const char *name) { return (void)name, NULL; }
