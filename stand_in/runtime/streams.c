/* Streams and events are numbers: all work is done when it is called, and who waits for whom is written down. What a
 * capture forbids is in captures.c. */
#include <stdio.h>
#include "phantom.h"

/* Streams that wait for the legacy one have numbers of their own. */
enum { FIRST_BLOCKING = 1 << 30 };

static void *new_number(void) {
    static uintptr_t last = 0x1000;
    return (void *)__atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
}

int is_legacy(const void *stream) { return !stream || stream == cudaStreamLegacy; }
int is_blocking(const void *stream) { return stream == cudaStreamPerThread || (uintptr_t)stream >= FIRST_BLOCKING; }

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = (cudaStream_t)((uintptr_t)new_number() + FIRST_BLOCKING);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    if (!(flags & cudaStreamNonBlocking)) return cudaStreamCreate(stream);
    *stream = new_number();
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreateWithFlags(stream, flags);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return begin_wait(stream); }

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaError_t error = begin_wait(stream);
    if (error) return error;
    note_sync("cudaStreamSynchronize", stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, cudaSuccess; }

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    int is_captured;
    cudaError_t error = begin_event_wait(event, stream, flags & cudaEventWaitExternal, &is_captured);
    if (error || is_captured) return error;
    note(EVENT_WAIT, "cudaStreamWaitEvent", (long long)(uintptr_t)event, stream, 0, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
    if (is_capturing(stream)) return refuse_work(stream);
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    if (is_capturing(stream)) {
        fprintf(stderr, "phantom: functions of the host are not captured: runtime/streams.c\n");
        return cudaErrorNotSupported;
    }
    function(data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = new_number();
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    forget_event(event);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    int is_captured;
    cudaError_t error = begin_record(event, stream, &is_captured);
    if (error || is_captured) return error;
    note(EVENT_RECORD, "cudaEventRecord", (long long)(uintptr_t)event, stream, 0, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    struct graph *graph;
    if (!(flags & cudaEventRecordExternal) || !is_capturing(stream)) return cudaEventRecord(event, stream);
    cudaError_t error = begin_work(stream, &graph); /* recorded by each launch */
    if (!error) add_node(graph, (struct node){.kind = NODE_KERNEL});
    return error;
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) { return begin_event_query(event); }

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    cudaError_t error = begin_event_query(event);
    if (error) return error;
    note_sync("cudaEventSynchronize", event);
    return cudaSuccess;
}

/* No time passes on the device; 0 would be divided by. */
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    return *milliseconds = 1.0f, cudaSuccess;
}
