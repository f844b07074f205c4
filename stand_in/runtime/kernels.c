/* Kernels are launched and compute nothing. nvcc's host code registers each one with its name before main(). */
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include "phantom.h"

struct kernel { const void *function; const char *name; };

static struct kernel *kernels;
static size_t count, capacity, sorted;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT char __cudaInitModule(void **handle) { return 0; }
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                              int constant, int global) {}

EXPORT void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name,
                                   int thread_limit, uint3 *thread, uint3 *block, dim3 *block_dim, dim3 *grid_dim,
                                   int *warp_size) {
    pthread_mutex_lock(&lock);
    if (count == capacity) {
        capacity = capacity ? 2 * capacity : 1 << 16;
        kernels = realloc(kernels, capacity * sizeof *kernels);
        if (!kernels) abort();
    }
    kernels[count++] = (struct kernel){function, name};
    pthread_mutex_unlock(&lock);
}

static int by_function(const void *a, const void *b) {
    uintptr_t left = (uintptr_t)((const struct kernel *)a)->function, right = (uintptr_t)((const struct kernel *)b)->function;
    return (left > right) - (left < right);
}

static const char *name_of(const void *function) {
    struct kernel wanted = {function, NULL};
    pthread_mutex_lock(&lock);
    if (sorted != count) qsort(kernels, count, sizeof *kernels, by_function); /* a library was loaded since */
    sorted = count;
    struct kernel *found = count ? bsearch(&wanted, kernels, count, sizeof *kernels, by_function) : NULL;
    pthread_mutex_unlock(&lock);
    return found ? found->name : "unknown kernel";
}

/* Kernels that count, sort or reduce: what they find (nonzero, unique, argmin) is read back right away and is a size or
   an index, so that the host's bytes that lay there before must not pass for it. */
static int finds_numbers(const char *name) { return strstr(name, "3cub") || strstr(name, "reduce_kernel"); }

static cudaError_t launch(const void *function, void **arguments, cudaStream_t stream) {
    const char *name = name_of(function);
    struct graph *graph;
    cudaError_t error = begin_work(stream, &graph);
    if (error) return error;
    stray_unless_covered(name, arguments);
    if (graph) {
        add_node(graph, (struct node){.kind = NODE_KERNEL});
        return cudaSuccess;
    }
    one_operation_passes();
    if (finds_numbers(name)) forget_known();
    note(KERNEL, name, 0, stream, 0, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
    return launch(function, arguments, stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
    return launch(function, arguments, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch(function, arguments, config->stream);
}

/* What kernel<<<...>>>() becomes: push the configuration, pop it in the kernel's host function, launch. */
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed[64];
static __thread int depth;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    if (depth == 64) return 1;
    pushed[depth].grid = grid;
    pushed[depth].block = block;
    pushed[depth].shared = shared;
    pushed[depth++].stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (!depth) return cudaErrorMissingConfiguration;
    depth--;
    *grid = pushed[depth].grid;
    *block = pushed[depth].block;
    *shared = pushed[depth].shared;
    *(void **)stream = pushed[depth].stream;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    return launch((const void *)kernel, arguments, stream);
}

/* ---- what is asked before a launch */

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = settings()->cc_major * 10 + settings()->cc_minor;
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                                 size_t shared) {
    return *blocks = 2, cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                          int threads, size_t shared, unsigned flags) {
    return *blocks = 2, cudaSuccess;
}
