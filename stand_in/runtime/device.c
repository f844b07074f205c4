/* What the device is. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "phantom.h"

struct card {
    int cc;
    const char *name;
    int multiprocessors;
    size_t shared_per_block, shared_per_multiprocessor; /* bytes, the most a kernel may ask for */
    int threads_per_multiprocessor;
};

/* One well-known card of each compute capability (NVIDIA's data sheets, CUDA programming guide, appendix on
   compute capabilities). */
static const struct card cards[] = {
    {75, "NVIDIA GeForce RTX 2080 Ti", 68, 64 << 10, 64 << 10, 1024},
    {80, "NVIDIA A100-SXM4-40GB", 108, 163 << 10, 164 << 10, 2048},
    {86, "NVIDIA GeForce RTX 3090", 82, 99 << 10, 100 << 10, 1536},
    {89, "NVIDIA GeForce RTX 4090", 128, 99 << 10, 100 << 10, 1536},
    {90, "NVIDIA H100 80GB HBM3", 132, 227 << 10, 228 << 10, 2048},
    {100, "NVIDIA B200", 148, 227 << 10, 228 << 10, 2048},
    {120, "NVIDIA GeForce RTX 5090", 170, 99 << 10, 100 << 10, 1536},
};

static __thread int current;

int current_device(void) { return current; }

static const struct card *card(void) {
    int cc = settings()->cc_major * 10 + settings()->cc_minor;
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++)
        if (cards[i].cc == cc) return &cards[i];
    fprintf(stderr, "phantom: PHANTOM_CC=%d is not in the table of runtime/device.c\n", cc);
    exit(2);
}

EXPORT cudaError_t cudaGetDeviceCount(int *number) {
    *number = settings()->devices;
    return *number ? cudaSuccess : cudaErrorNoDevice;
}

EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return settings()->devices ? cudaSuccess : cudaErrorNoDevice;
}

EXPORT cudaError_t cudaSetDevice(int device) {
    if (!settings()->devices) return cudaErrorNoDevice;
    if (device < 0 || device >= settings()->devices) return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    const struct card *the = card();
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "%s", the->name);
    properties->totalGlobalMem = settings()->memory;
    properties->major = settings()->cc_major;
    properties->minor = settings()->cc_minor;
    properties->multiProcessorCount = the->multiprocessors;
    properties->warpSize = 32;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = the->shared_per_block;
    properties->sharedMemPerMultiprocessor = the->shared_per_multiprocessor;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 64 << 10;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = the->threads_per_multiprocessor;
    properties->maxBlocksPerMultiProcessor = 16;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->l2CacheSize = 6 << 20;
    properties->totalConstMem = 64 << 10;
    properties->unifiedAddressing = properties->managedMemory = properties->concurrentKernels = 1;
    properties->asyncEngineCount = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
        case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
        case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = properties.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = properties.sharedMemPerMultiprocessor; break;
        case cudaDevAttrWarpSize: *value = properties.warpSize; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
        case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[1]; break;
        case cudaDevAttrMaxBlockDimX:
        case cudaDevAttrMaxBlockDimY: *value = properties.maxThreadsDim[0]; break;
        case cudaDevAttrMaxBlockDimZ: *value = properties.maxThreadsDim[2]; break;
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrManagedMemory:
        case cudaDevAttrConcurrentManagedAccess: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, cudaSuccess; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaErrorPeerAccessUnsupported; }

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t error = begin_wait(EVERYTHING);
    if (error) return error;
    note_sync("cudaDeviceSynchronize", EVERYTHING);
    return cudaSuccess;
}

/* Every failure is returned by the call itself, none comes later. Those of captures are kept, too, since the values of
   launches are thrown away. */
static __thread cudaError_t last_error;

cudaError_t keep_error(cudaError_t error) {
    if (error) last_error = error;
    return error;
}

EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

static const struct { cudaError_t error; const char *name, *text; } capture_errors[] = {
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
};

static int index_of(cudaError_t error) {
    int index = sizeof capture_errors / sizeof *capture_errors - 1;
    while (index >= 0 && capture_errors[index].error != error) index--;
    return index;
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    if (index_of(error) >= 0) return capture_errors[index_of(error)].text;
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNotSupported: return "operation not supported (by the stand-in for CUDA)";
        default: return "error of the stand-in for CUDA";
    }
}

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    if (index_of(error) >= 0) return capture_errors[index_of(error)].name;
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorNotSupported: return "cudaErrorNotSupported";
        default: return "cudaErrorUnknown";
    }
}

EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

EXPORT cudaError_t cudaIpcCloseMemHandle(void *pointer) { return cudaErrorNotSupported; }
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) { return cudaErrorNotSupported; }
EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) { return cudaErrorNotSupported; }
EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) { return cudaErrorNotSupported; }
EXPORT cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) { return cudaErrorNotSupported; }
