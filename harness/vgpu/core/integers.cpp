// Handlers of integer arithmetic, bits and comparisons: half of the core's build, in a translation unit of its own so that
// two compilers share the work.
#define VGPU_INTEGERS
#include "host.h"
#include "compare.h"
