/* Graphs: what was captured, in its order. A launch is one operation; it moves the bytes of the captured copies and lets
 * Python compute the captured operators (../values). Kernels compute nothing, as everywhere.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include "phantom.h"

struct graph {
    unsigned long long id;
    int references; /* the graph itself, and what was made ready for launches from it */
    struct node *nodes;
    size_t count, capacity, kernels;
};

static int (*compute)(int number);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct graph *make_graph(unsigned long long id) {
    struct graph *made = calloc(1, sizeof *made);
    made->id = id;
    made->references = 1;
    return made;
}

void drop_graph(struct graph *graph) {
    if (__atomic_sub_fetch(&graph->references, 1, __ATOMIC_RELAXED)) return;
    free(graph->nodes);
    free(graph);
}

void add_node(struct graph *graph, struct node node) {
    pthread_mutex_lock(&lock);
    if (graph->count == graph->capacity) {
        graph->capacity = graph->capacity ? 2 * graph->capacity : 256;
        graph->nodes = realloc(graph->nodes, graph->capacity * sizeof *graph->nodes);
        if (!graph->nodes) abort();
    }
    graph->nodes[graph->count++] = node;
    graph->kernels += node.kind != NODE_COMPUTE;
    pthread_mutex_unlock(&lock);
}

/* ---- for Python: the function that computes what was captured by its number, and the number of one more operator */

EXPORT void phantom_on_compute(int (*callback)(int)) { compute = callback; }

EXPORT int phantom_capture(void *stream, int number) {
    struct graph *graph;
    cudaError_t error = begin_work(stream, &graph);
    if (!error && graph) add_node(graph, (struct node){.kind = NODE_COMPUTE, .number = number});
    return error;
}

/* How many kernels and copies the capture of this stream has so far, and its id; -1 where there is none. */
EXPORT long phantom_captured(void *stream, unsigned long long *id) {
    enum cudaStreamCaptureStatus status;
    cudaGraph_t graph;
    cudaStreamGetCaptureInfo(stream, &status, id, &graph, NULL, NULL, NULL);
    return graph ? (long)((struct graph *)graph)->kernels : -1;
}

/* ---- the runtime */

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) {
    if (nodes) return cudaErrorNotSupported;
    *number = ((struct graph *)graph)->kernels;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *dependencies,
                                                cudaGraphEdgeData *edges, size_t *number) {
    return cudaErrorNotSupported;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    __atomic_add_fetch(&((struct graph *)graph)->references, 1, __ATOMIC_RELAXED);
    *made = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(made, graph, flags);
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    cudaError_t error = begin_unsafe_call();
    if (error) return error;
    drop_graph((struct graph *)graph);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    cudaError_t error = begin_unsafe_call();
    if (error) return error;
    drop_graph((struct graph *)graph);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t graph, cudaStream_t stream) { return cudaSuccess; }

static int run(const struct node *node) {
    one_operation_passes();
    if (node->kind == NODE_COPY) move_contents(node->to, node->from, node->size, node->number);
    if (node->kind == NODE_SET) set_contents(node->to, node->number, node->size);
    return node->kind != NODE_COMPUTE || (compute && compute(node->number));
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
    struct graph *graph = (struct graph *)handle, *outer;
    cudaError_t error = begin_work(stream, &outer);
    if (error) return error;
    if (outer) {
        fprintf(stderr, "phantom: a graph in a graph is not supported: runtime/graphs.c\n");
        return cudaErrorNotSupported;
    }
    note(GRAPH, "cudaGraphLaunch", graph->kernels, stream, (int)graph->id, 0);
    forget_known(); /* kernels were meant to change it */
    for (size_t i = 0; i < graph->count; i++)
        if (!run(&graph->nodes[i])) return cudaErrorUnknown;
    return cudaSuccess;
}
