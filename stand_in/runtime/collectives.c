/* Collectives and messages. Every one is noted; at most SMALL bytes really pass between the ranks, so that what they
 * tell each other arrives. Larger ones (weights, gradients), reduce-scatters and messages pass with PHANTOM_VALUES only.
 * All is done where it is called: on a stream it would come later, but not before what was given to the stream earlier.
 */
#include <stdlib.h>
#include <string.h>
#include "nccl.h"

/* A graph could hold collectives; here none does, since the ranks would have to launch it together. */
static int begin_collective(const char *name, size_t size, const struct communicator *comm, const void *stream) {
    if (is_capturing(stream)) {
        refuse_work(stream);
        return fail(INVALID_USAGE, "phantom: collectives are not captured");
    }
    one_operation_passes();
    note(COLLECTIVE, name, size, stream, comm->number, comm->ranks);
    return SUCCESS;
}

static int passes(size_t size) { return size <= SMALL || settings()->values; }

/* PHANTOM_NCCL_FAIL: this many gathers succeed. */
static int failure_asked_for(void) {
    static long calls;
    long allowed = settings()->nccl_calls_until_failure;
    if (allowed < 0 || __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) <= allowed) return SUCCESS;
    return fail(settings()->nccl_failure, settings()->nccl_failure_text);
}

EXPORT int ncclAllGather(const void *from, void *to, size_t number, int type, struct communicator *comm, void *stream) {
    size_t size = size_of(number, type);
    int known, status = failure_asked_for();
    if (!status) status = begin_collective("all_gather", size * comm->ranks, comm, stream);
    if (status) return status;
    if (!passes(size * comm->ranks)) return SUCCESS;
    status = exchange_contents(comm, from, size, to, &known);
    if (known) set_known(to, size * comm->ranks);
    return status;
}

/* What all ranks have, reduced, from its element `first` on: `number` elements to `to`. */
static int reduce_all(struct communicator *comm, const void *from, size_t whole, size_t first, void *to, size_t number,
                      int type, int operation) {
    size_t stride = size_of(whole, type), size = size_of(number, type);
    int known;
    char *all = malloc(stride * comm->ranks + 1), *part = all + size_of(first, type);
    int status = exchange_contents(comm, from, stride, all, &known);
    if (known) {
        reduce(part, stride, comm->ranks, number, type, operation);
        memcpy(to, part, size);
        set_known(to, size);
    }
    free(all);
    return status;
}

EXPORT int ncclAllReduce(const void *from, void *to, size_t number, int type, int operation,
                         struct communicator *comm, void *stream) {
    size_t size = size_of(number, type);
    int status = begin_collective("all_reduce", size, comm, stream);
    if (status) return status;
    return passes(size * comm->ranks) ? reduce_all(comm, from, number, 0, to, number, type, operation) : SUCCESS;
}

EXPORT int ncclReduceScatter(const void *from, void *to, size_t number, int type, int operation,
                             struct communicator *comm, void *stream) {
    int status = begin_collective("reduce_scatter", size_of(number, type) * comm->ranks, comm, stream);
    if (status || !settings()->values) return status;
    return reduce_all(comm, from, number * comm->ranks, number * comm->rank, to, number, type, operation);
}

EXPORT int ncclReduce(const void *from, void *to, size_t number, int type, int operation, int root,
                      struct communicator *comm, void *stream) {
    size_t size = size_of(number, type);
    int status = begin_collective("reduce", size, comm, stream);
    if (status || !settings()->values) return status;
    char *whole = malloc(size + 1);
    status = reduce_all(comm, from, number, 0, whole, number, type, operation);
    if (comm->rank == root) memcpy(to, whole, size);
    free(whole);
    return status;
}

EXPORT int ncclAlltoAll(const void *from, void *to, size_t number, int type, struct communicator *comm, void *stream) {
    size_t size = size_of(number, type), whole = size * comm->ranks;
    int known, status = begin_collective("all_to_all", whole, comm, stream);
    if (status || !settings()->values) return status;
    char *all = malloc(whole * comm->ranks + 1);
    status = exchange_contents(comm, from, whole, all, &known);
    for (int rank = 0; rank < comm->ranks; rank++)
        memcpy((char *)to + rank * size, all + rank * whole + comm->rank * size, size);
    free(all);
    return status;
}

EXPORT int ncclBroadcast(const void *from, void *to, size_t number, int type, int root, struct communicator *comm, void *stream) {
    size_t size = size_of(number, type);
    int known, status = begin_collective("broadcast", size, comm, stream);
    if (status || !passes(size * comm->ranks)) return status;
    char *all = malloc(size * comm->ranks);
    status = exchange_contents(comm, comm->rank == root ? from : to, size, all, &known);
    if (status == SUCCESS) {
        memcpy(to, all + root * size, size);
        set_known(to, size);
    }
    free(all);
    return status;
}

EXPORT int ncclBcast(void *buffer, size_t number, int type, int root, struct communicator *comm, void *stream) {
    return ncclBroadcast(buffer, buffer, number, type, root, comm, stream);
}

/* ---- from rank to rank. In a group all sends come before the receives, or two ranks would wait for each other. */

enum { RECEIVES = 1024 };
static __thread struct { struct communicator *comm; int from; void *to; size_t size; } waiting[RECEIVES];
static __thread int number_waiting, depth;

EXPORT int ncclGroupStart(void) { return depth++, SUCCESS; }

EXPORT int ncclGroupEnd(void) {
    int status = SUCCESS;
    if (--depth) return status;
    for (int i = 0; i < number_waiting && status == SUCCESS; i++)
        status = receive_message(waiting[i].comm, waiting[i].from, waiting[i].to, waiting[i].size);
    number_waiting = 0;
    return status;
}

EXPORT int ncclSend(const void *from, size_t number, int type, int peer, struct communicator *comm, void *stream) {
    int status = begin_collective("send", size_of(number, type), comm, stream);
    if (status) return status;
    return settings()->values ? send_message(comm, peer, from, size_of(number, type)) : SUCCESS;
}

EXPORT int ncclRecv(void *to, size_t number, int type, int peer, struct communicator *comm, void *stream) {
    size_t size = size_of(number, type);
    int status = begin_collective("recv", size, comm, stream);
    if (status || !settings()->values) return status;
    if (!depth) return receive_message(comm, peer, to, size);
    if (number_waiting == RECEIVES) return fail(SYSTEM_ERROR, "phantom: too many receives in one group");
    waiting[number_waiting].comm = comm;
    waiting[number_waiting].from = peer;
    waiting[number_waiting].to = to;
    waiting[number_waiting++].size = size;
    return SUCCESS;
}
