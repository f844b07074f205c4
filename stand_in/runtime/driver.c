/* The few functions of the driver API that torch calls: the context, and the pages of expandable segments. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "phantom.h"

enum { OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801, PAGE = 2 << 20 };

EXPORT int cuInit(unsigned flags) { return 0; }
EXPORT int cuDriverGetVersion(int *version) { return *version = CUDART_VERSION, 0; }
EXPORT int cuDeviceGetCount(int *number) { return *number = settings()->devices, 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
EXPORT int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
EXPORT int cuCtxSetCurrent(void *context) { return 0; }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)1, 0; }

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}

/* The attributes have the same numbers in both APIs. */
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}

EXPORT int cuGetErrorString(int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : "error of the stand-in for the CUDA driver";
    return 0;
}

/* ---- expandable segments: addresses first, memory for them page by page */

struct pages { size_t size; };

static int mem_address_reserve(uintptr_t *address, size_t size, size_t alignment, uintptr_t wanted, unsigned long long flags) {
    *address = (uintptr_t)reserve_range(size, DEVICE, current_device());
    return *address ? 0 : OUT_OF_MEMORY;
}

static int mem_address_free(uintptr_t address, size_t size) {
    release_range((void *)address);
    return 0;
}

static int mem_create(struct pages **handle, size_t size, const void *properties, unsigned long long flags) {
    if (!take_memory(size)) return OUT_OF_MEMORY;
    *handle = malloc(sizeof **handle);
    (*handle)->size = size;
    note(MALLOC, "cuMemCreate", size, NULL, 0, 0);
    return 0;
}

static int mem_release(struct pages *handle) {
    give_memory(handle->size);
    note(FREE, "cuMemRelease", handle->size, NULL, 0, 0);
    free(handle);
    return 0;
}

static int mem_granularity(size_t *size, const void *properties, int option) { return *size = PAGE, 0; }
static int succeed(void) { return 0; }

/* The handed out names that are not here; a call does not tell which of them it is. */
static char lacking[2048];

static int refuse(void) {
    fprintf(stderr, "phantom: a function of the CUDA driver was called that runtime/driver.c lacks. One of:%s\n", lacking);
    return NOT_SUPPORTED;
}

static const struct { const char *name; void *function; } functions[] = {
    {"cuMemAddressReserve", mem_address_reserve},
    {"cuMemAddressFree", mem_address_free},
    {"cuMemCreate", mem_create},
    {"cuMemRelease", mem_release},
    {"cuMemMap", succeed},
    {"cuMemUnmap", succeed},
    {"cuMemSetAccess", succeed},
    {"cuMemGetAllocationGranularity", mem_granularity},
    {"cuGetErrorString", cuGetErrorString},
    {"cuInit", cuInit},
    {"cuDeviceGet", cuDeviceGet},
    {"cuDeviceGetAttribute", cuDeviceGetAttribute},
    {"cuCtxGetCurrent", cuCtxGetCurrent},
    {"cuCtxSetCurrent", cuCtxSetCurrent},
    {"cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain},
    {"cuDevicePrimaryCtxGetState", cuDevicePrimaryCtxGetState},
    {"cuTensorMapEncodeTiled", succeed},  /* which kernels that multiply groups prepare */
};

void *driver_function(const char *name) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, name)) return functions[i].function;
    size_t written = strlen(lacking);
    snprintf(lacking + written, sizeof lacking - written, " %s", name);
    return refuse;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
    *function = driver_function(name);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
