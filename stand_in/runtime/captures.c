/* Captures of streams into graphs: who takes part, and what is forbidden meanwhile.
 *
 * The rules and the codes are those of CUDA's programming guide ("prohibited and unhandled operations" of stream
 * capture) and of cudaThreadExchangeStreamCaptureMode. What is refused invalidates the capture, whose next calls and
 * whose end then fail. Which calls are potentially unsafe is nowhere listed: here they are those that allocate, free or
 * pin memory or destroy graphs, and those by which the host waits for, or asks about, work that is not captured.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include "phantom.h"

enum { STREAMS = 64 }; /* in one capture */

/* A stream of a capture: how much work it has been given, and of each stream how much comes before its next work. */
struct member { const void *stream; int work; int known[STREAMS]; };

struct capture {
    unsigned long long id;
    enum cudaStreamCaptureMode mode;
    pthread_t thread; /* which began it */
    int is_invalid;
    int streams;
    struct member members[STREAMS]; /* the first is the one on which it began */
    struct graph *graph;
    struct capture *next;
};

/* What an event holds that was last recorded in a capture. */
struct moment { unsigned long long capture; int known[STREAMS]; };

static struct capture *captures; /* those that are not ended */
static struct moment **moments;  /* by the number of the event; NULL: not captured */
static uintptr_t number_of_moments;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread enum cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

/* ---- helpers, under the lock */

static struct member *member_of(struct capture *capture, const void *stream) {
    for (int i = 0; i < capture->streams; i++)
        if (capture->members[i].stream == stream) return &capture->members[i];
    return NULL;
}

static struct capture *capture_of(const void *stream) {
    for (struct capture *each = captures; each; each = each->next)
        if (member_of(each, stream)) return each;
    return NULL;
}

static struct capture *capture_with(unsigned long long id) {
    for (struct capture *each = captures; each; each = each->next)
        if (each->id == id) return each;
    return NULL;
}

/* A capture that work on the legacy stream would wait for: one of a blocking stream. */
static struct capture *implied_by(const void *stream) {
    if (!is_legacy(stream)) return NULL;
    for (struct capture *each = captures; each; each = each->next)
        for (int i = 0; i < each->streams; i++)
            if (is_blocking(each->members[i].stream)) return each;
    return NULL;
}

static cudaError_t invalidate(struct capture *capture, cudaError_t error) {
    if (capture) capture->is_invalid = 1;
    return error;
}

/* Whether something may be given to, or asked about, `stream`; `capture` is the one in which it is. */
static cudaError_t check(const void *stream, struct capture **capture) {
    *capture = capture_of(stream);
    if (*capture) return (*capture)->is_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    struct capture *implied = implied_by(stream);
    return implied ? invalidate(implied, cudaErrorStreamCaptureImplicit) : cudaSuccess;
}

/* This thread's own captures in every mode but relaxed, and those of others in the global one. */
static int forbids_unsafe_calls(const struct capture *capture) {
    if (mode_of_thread == cudaStreamCaptureModeRelaxed) return 0;
    if (pthread_equal(capture->thread, pthread_self())) return capture->mode != cudaStreamCaptureModeRelaxed;
    return mode_of_thread == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
}

static cudaError_t check_unsafe(void) {
    cudaError_t error = cudaSuccess;
    for (struct capture *each = captures; each; each = each->next)
        if (forbids_unsafe_calls(each)) error = invalidate(each, cudaErrorStreamCaptureUnsupported);
    return error;
}

static struct moment **moment_of(const void *event) {
    uintptr_t number = (uintptr_t)event;
    if (number >= number_of_moments) {
        uintptr_t larger = 2 * number;
        moments = realloc(moments, larger * sizeof *moments);
        if (!moments) abort();
        memset(moments + number_of_moments, 0, (larger - number_of_moments) * sizeof *moments);
        number_of_moments = larger;
    }
    return &moments[number];
}

static void forget_moment(const void *event) {
    struct moment **moment = moment_of(event);
    free(*moment);
    *moment = NULL;
}

/* ---- what the other files ask */

cudaError_t begin_work(const void *stream, struct graph **graph) {
    struct capture *capture;
    pthread_mutex_lock(&lock);
    cudaError_t error = check(stream, &capture);
    *graph = NULL;
    if (!error && capture) {
        struct member *member = member_of(capture, stream);
        member->known[member - capture->members] = ++member->work;
        *graph = capture->graph;
    }
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

cudaError_t refuse_work(const void *stream) {
    pthread_mutex_lock(&lock);
    cudaError_t error = invalidate(capture_of(stream), cudaErrorStreamCaptureUnsupported);
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

int is_capturing(const void *stream) {
    pthread_mutex_lock(&lock);
    int found = capture_of(stream) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

cudaError_t begin_unsafe_call(void) {
    pthread_mutex_lock(&lock);
    cudaError_t error = check_unsafe();
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

cudaError_t begin_wait(const void *stream) {
    struct capture *capture = NULL;
    pthread_mutex_lock(&lock);
    cudaError_t error = cudaSuccess;
    if (stream == EVERYTHING) {
        for (struct capture *each = captures; each; each = each->next)
            error = invalidate(each, cudaErrorStreamCaptureUnsupported);
    } else {
        error = check(stream, &capture);
        if (!error && capture) error = invalidate(capture, cudaErrorStreamCaptureUnsupported);
    }
    if (!error) error = check_unsafe();
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

cudaError_t begin_blocking_copy(void) {
    struct capture *capture;
    pthread_mutex_lock(&lock);
    cudaError_t error = check(NULL, &capture); /* it is work on the legacy stream */
    if (!error) error = check_unsafe();
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

/* ---- events */

cudaError_t begin_record(const void *event, const void *stream, int *is_captured) {
    struct capture *capture;
    pthread_mutex_lock(&lock);
    cudaError_t error = check(stream, &capture);
    *is_captured = capture != NULL;
    if (!error) forget_moment(event);
    if (!error && capture) {
        struct moment *moment = *moment_of(event) = malloc(sizeof **moments);
        moment->capture = capture->id;
        memcpy(moment->known, member_of(capture, stream)->known, sizeof moment->known);
    }
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

/* The next work of `stream` comes after a captured moment, by which it becomes part of the capture. */
static cudaError_t join(struct capture *capture, const void *stream, const struct moment *moment) {
    struct member *member = member_of(capture, stream);
    if (is_legacy(stream)) return invalidate(capture, cudaErrorStreamCaptureImplicit);
    if (!member && capture->streams == STREAMS) return invalidate(capture, cudaErrorNotSupported);
    if (!member) {
        member = &capture->members[capture->streams++];
        memset(member, 0, sizeof *member);
        member->stream = stream;
    }
    for (int i = 0; i < STREAMS; i++)
        if (member->known[i] < moment->known[i]) member->known[i] = moment->known[i];
    return cudaSuccess;
}

static cudaError_t wait_in(struct capture *capture, const void *stream, const struct moment *moment) {
    struct capture *other = moment ? capture_with(moment->capture) : NULL;
    if (!capture && !moment) return cudaSuccess;
    if (!other) return invalidate(capture, cudaErrorStreamCaptureIsolation);
    if (other->is_invalid) return invalidate(capture, cudaErrorStreamCaptureInvalidated);
    if (capture && other != capture) {
        invalidate(other, cudaSuccess);
        return invalidate(capture, cudaErrorStreamCaptureMerge);
    }
    return join(other, stream, moment);
}

cudaError_t begin_event_wait(const void *event, const void *stream, int is_external, int *is_captured) {
    struct capture *capture;
    pthread_mutex_lock(&lock);
    const struct moment *moment = *moment_of(event);
    cudaError_t error = check(stream, &capture);
    if (!error && !(capture && is_external)) error = wait_in(capture, stream, moment);
    *is_captured = capture || moment;
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

cudaError_t begin_event_query(const void *event) {
    pthread_mutex_lock(&lock);
    const struct moment *moment = *moment_of(event);
    cudaError_t error = moment ? invalidate(capture_with(moment->capture), cudaErrorCapturedEvent) : check_unsafe();
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

void forget_event(const void *event) {
    pthread_mutex_lock(&lock);
    forget_moment(event);
    pthread_mutex_unlock(&lock);
}

/* ---- begin, end, state */

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = mode_of_thread;
    mode_of_thread = *mode;
    *mode = before;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    static unsigned long long last_id;
    if (is_legacy(stream)) return keep_error(cudaErrorStreamCaptureUnsupported);
    pthread_mutex_lock(&lock);
    cudaError_t error = capture_of(stream) ? cudaErrorIllegalState : cudaSuccess;
    if (!error) {
        struct capture *made = calloc(1, sizeof *made);
        made->id = ++last_id;
        made->mode = mode;
        made->thread = pthread_self();
        made->streams = 1;
        made->members[0].stream = stream;
        made->graph = make_graph(made->id);
        made->next = captures;
        captures = made;
    }
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

static int has_unjoined_work(const struct capture *capture) {
    for (int i = 1; i < capture->streams; i++)
        if (capture->members[0].known[i] < capture->members[i].work) return 1;
    return 0;
}

static cudaError_t end(struct capture *capture, cudaGraph_t *graph) {
    struct capture **link = &captures;
    while (*link != capture) link = &(*link)->next;
    *link = capture->next;
    cudaError_t error = capture->is_invalid            ? cudaErrorStreamCaptureInvalidated
                        : has_unjoined_work(capture) ? cudaErrorStreamCaptureUnjoined
                                                       : cudaSuccess;
    if (error) drop_graph(capture->graph);
    else *graph = (cudaGraph_t)capture->graph;
    free(capture);
    return error;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = NULL;
    pthread_mutex_lock(&lock);
    struct capture *capture = capture_of(stream);
    cudaError_t error;
    if (!capture) error = cudaErrorIllegalState;
    else if (capture->members[0].stream != stream) error = invalidate(capture, cudaErrorStreamCaptureUnmatched);
    else if (capture->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(capture->thread, pthread_self()))
        error = cudaErrorStreamCaptureWrongThread;
    else error = end(capture, graph);
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

/* Asked about the legacy stream while a blocking one is captured, this fails and invalidates nothing. */
static cudaError_t state_of(const void *stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                            cudaGraph_t *graph) {
    pthread_mutex_lock(&lock);
    struct capture *capture = capture_of(stream);
    cudaError_t error = implied_by(stream) ? cudaErrorStreamCaptureImplicit : cudaSuccess;
    *status = !capture              ? cudaStreamCaptureStatusNone
              : capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? (cudaGraph_t)capture->graph : NULL;
    pthread_mutex_unlock(&lock);
    return keep_error(error);
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return state_of(stream, status, NULL, NULL);
}

/* The nodes on which the stream's next one depends are not told: none of them can be looked at. */
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *number) {
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (number) *number = 0;
    return state_of(stream, status, id, graph);
}
