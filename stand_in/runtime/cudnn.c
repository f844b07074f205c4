/* The version of cuDNN, from which torch knows whether SDPA may take cuDNN's kernels. By default there is none: torch
   prefers them on some cards, and without values nothing here answers their calls. */
#include "phantom.h"

EXPORT size_t cudnnGetVersion(void) { return settings()->cudnn; }
