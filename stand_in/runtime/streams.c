/* Streams and events are numbers: all work is done when it is called, and who waits for whom is written down. */
#include "phantom.h"

static void *new_number(void) {
    static uintptr_t last = 0x1000;
    return (void *)__atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = new_number();
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreate(stream);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    note_sync("cudaStreamSynchronize", stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, cudaSuccess; }

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    note(EVENT_WAIT, "cudaStreamWaitEvent", (long long)(uintptr_t)event, stream, 0, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = new_number();
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    note(EVENT_RECORD, "cudaEventRecord", (long long)(uintptr_t)event, stream, 0, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    note_sync("cudaEventSynchronize", event);
    return cudaSuccess;
}

/* No time passes on the device; 0 would be divided by. */
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    return *milliseconds = 1.0f, cudaSuccess;
}

/* ---- graphs: nothing is ever being captured, and capturing is refused */

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *number) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (number) *number = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) { return cudaErrorNotSupported; }
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) { return cudaErrorNotSupported; }
