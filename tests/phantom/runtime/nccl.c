/* Collectives. Every one is noted; messages of at most SMALL bytes really pass between the ranks, through files, so
 * that what ranks tell each other arrives. Larger ones (weights, gradients) are not moved.
 *
 * In a small exchange each rank leaves one file and reads those of all others. The host waits for them, which real
 * NCCL does not do; a rank that does not come is an error after PHANTOM_NCCL_SECONDS.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "phantom.h"

enum { SUCCESS = 0, SYSTEM_ERROR = 2, REMOTE_ERROR = 6, NO_COLOR = -1, POLL_MICROSECONDS = 200 };
enum { SUM, PROD, MAX, MIN, AVG };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 };
static const int bytes_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct unique_id { char text[128]; };
struct communicator { int ranks, rank, number; long exchanges; char id[96]; };
/* NCCL's callers may look at a communicator's first bytes: keep them ours, and the block large. */
enum { COMMUNICATOR_SIZE = 4096, KEPT_FILES = 2 };

static char last_error[256];

static int fail(int status, const char *text) {
    snprintf(last_error, sizeof last_error, "%s", text);
    return status;
}

/* ---- exchanges */

static void path_of(char *path, size_t size, const struct communicator *comm, long exchange, int rank) {
    snprintf(path, size, "%s/phantom_%s_%ld_%d", settings()->exchange_dir, comm->id, exchange, rank);
}

static int leave(const struct communicator *comm, const void *message, size_t size) {
    char path[512], unfinished[520];
    path_of(path, sizeof path, comm, comm->exchanges, comm->rank);
    snprintf(unfinished, sizeof unfinished, "%s.part", path);
    FILE *file = fopen(unfinished, "wb");
    if (!file) return 0;
    int written = fwrite(message, 1, size, file) == size;
    return !fclose(file) && written && !rename(unfinished, path);
}

static int collect(const struct communicator *comm, int rank, void *message, size_t size) {
    char path[512];
    path_of(path, sizeof path, comm, comm->exchanges, rank);
    long polls = settings()->exchange_seconds * (1000000L / POLL_MICROSECONDS);
    FILE *file;
    while (!(file = fopen(path, "rb")) && polls-- > 0) usleep(POLL_MICROSECONDS);
    if (!file) return 0;
    int whole = fread(message, 1, size, file) == size && fgetc(file) == EOF;
    fclose(file);
    return whole;
}

/* Every rank's `size` bytes, one after the other, to `all`. */
static int exchange(struct communicator *comm, const void *mine, size_t size, char *all) {
    char path[512];
    if (comm->ranks == 1) return memcpy(all, mine, size), SUCCESS;
    if (!leave(comm, mine, size)) return fail(SYSTEM_ERROR, "phantom: PHANTOM_DIR cannot be written");
    for (int rank = 0; rank < comm->ranks; rank++)
        if (!collect(comm, rank, all + rank * size, size))
            return fail(REMOTE_ERROR, "phantom: another rank did not come, or came with another size");
    path_of(path, sizeof path, comm, comm->exchanges - KEPT_FILES, comm->rank); /* all have read it: they were here since */
    unlink(path);
    comm->exchanges++;
    return SUCCESS;
}

/* Exchange device memory. Returns with *known set when every rank's bytes were known (contents.c). */
static int exchange_contents(struct communicator *comm, const void *mine, size_t size, char *all, int *known) {
    char *message = malloc(size + 1), *messages = malloc((size + 1) * comm->ranks);
    message[0] = (char)is_known(mine, size);
    memcpy(message + 1, mine, size);
    int status = exchange(comm, message, size + 1, messages);
    *known = status == SUCCESS;
    for (int rank = 0; status == SUCCESS && rank < comm->ranks; rank++) {
        *known &= messages[rank * (size + 1)];
        memcpy(all + rank * size, messages + rank * (size + 1) + 1, size);
    }
    free(message);
    free(messages);
    return status;
}

/* ---- communicators */

static int make(struct communicator **made, int ranks, int rank, const char *id) {
    static int number;
    *made = calloc(1, COMMUNICATOR_SIZE);
    (*made)->ranks = ranks;
    (*made)->rank = rank;
    (*made)->number = __atomic_fetch_add(&number, 1, __ATOMIC_RELAXED);
    snprintf((*made)->id, sizeof (*made)->id, "%s", id);
    return SUCCESS;
}

EXPORT int ncclGetVersion(int *version) { return *version = 22809, SUCCESS; }

EXPORT int ncclGetUniqueId(struct unique_id *id) {
    static int made;
    memset(id, 0, sizeof *id);
    snprintf(id->text, sizeof id->text, "%d_%d", getpid(), __atomic_fetch_add(&made, 1, __ATOMIC_RELAXED));
    return SUCCESS;
}

EXPORT int ncclCommInitRank(struct communicator **made, int ranks, struct unique_id id, int rank) {
    return make(made, ranks, rank, id.text);
}

EXPORT int ncclCommInitRankConfig(struct communicator **made, int ranks, struct unique_id id, int rank, void *config) {
    return make(made, ranks, rank, id.text);
}

EXPORT int ncclCommInitRankScalable(struct communicator **made, int ranks, int rank, int ids, struct unique_id *id, void *config) {
    return make(made, ranks, rank, id->text);
}

EXPORT int ncclCommSplit(struct communicator *parent, int color, int key, struct communicator **made, void *config) {
    int mine[2] = {color, key}, all[2 * parent->ranks], ranks = 0, rank = 0;
    char id[96];
    snprintf(id, sizeof id, "%.60s_%ld.%d", parent->id, parent->exchanges, color);
    int status = exchange(parent, mine, sizeof mine, (char *)all);
    if (status) return status;
    *made = NULL;
    if (color == NO_COLOR) return SUCCESS;
    for (int other = 0; other < parent->ranks; other++) {
        if (all[2 * other] != color) continue;
        int other_key = all[2 * other + 1];
        ranks++;
        rank += other_key < key || (other_key == key && other < parent->rank);
    }
    return make(made, ranks, rank, id);
}

EXPORT int ncclCommDestroy(struct communicator *comm) { return SUCCESS; }
EXPORT int ncclCommAbort(struct communicator *comm) { return SUCCESS; }
EXPORT int ncclCommFinalize(struct communicator *comm) { return SUCCESS; }
EXPORT int ncclCommGetAsyncError(struct communicator *comm, int *error) { return *error = SUCCESS, SUCCESS; }
EXPORT int ncclCommCount(struct communicator *comm, int *ranks) { return *ranks = comm->ranks, SUCCESS; }
EXPORT int ncclCommUserRank(struct communicator *comm, int *rank) { return *rank = comm->rank, SUCCESS; }
EXPORT int ncclCommRegister(struct communicator *comm, void *buffer, size_t size, void **handle) { return *handle = NULL, SUCCESS; }
EXPORT int ncclCommDeregister(struct communicator *comm, void *handle) { return SUCCESS; }
EXPORT int ncclGroupStart(void) { return SUCCESS; }
EXPORT int ncclGroupEnd(void) { return SUCCESS; }
EXPORT int ncclMemAlloc(void **pointer, size_t size) { return cudaMalloc(pointer, size) ? 1 : SUCCESS; }
EXPORT int ncclMemFree(void *pointer) { return cudaFree(pointer) ? 1 : SUCCESS; }
EXPORT int ncclRedOpCreatePreMulSum(int *made, void *scalar, int type, int residence, struct communicator *comm) { return *made = SUM, SUCCESS; }
EXPORT int ncclRedOpDestroy(int operation, struct communicator *comm) { return SUCCESS; }
EXPORT const char *ncclGetLastError(struct communicator *comm) { return last_error; }

EXPORT const char *ncclGetErrorString(int error) {
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process exited or there was a network error"};
    return error >= 0 && error <= REMOTE_ERROR ? texts[error] : "unknown result code";
}

/* ---- collectives */

static void note_collective(const char *name, size_t size, const struct communicator *comm, const void *stream) {
    one_operation_passes();
    note(COLLECTIVE, name, size, stream, comm->number, comm->ranks);
}

/* PHANTOM_NCCL_FAIL: this many gathers succeed. */
static int failure_asked_for(void) {
    static long calls;
    long allowed = settings()->nccl_calls_until_failure;
    if (allowed < 0 || __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) <= allowed) return SUCCESS;
    return fail(settings()->nccl_failure, settings()->nccl_failure_text);
}

EXPORT int ncclAllGather(const void *from, void *to, size_t number, int type, struct communicator *comm, void *stream) {
    size_t size = number * bytes_of[type];
    int known, status = failure_asked_for();
    if (status) return status;
    note_collective("all_gather", size * comm->ranks, comm, stream);
    if (size * comm->ranks > SMALL) return SUCCESS;
    status = exchange_contents(comm, from, size, to, &known);
    if (known) set_known(to, size * comm->ranks);
    return status;
}

EXPORT int ncclReduceScatter(const void *from, void *to, size_t number, int type, int operation,
                             struct communicator *comm, void *stream) {
    note_collective("reduce_scatter", number * bytes_of[type] * comm->ranks, comm, stream);
    return SUCCESS;
}

EXPORT int ncclAlltoAll(const void *from, void *to, size_t number, int type, struct communicator *comm, void *stream) {
    note_collective("all_to_all", number * bytes_of[type] * comm->ranks, comm, stream);
    return SUCCESS;
}

#define REDUCE(type, result, part, number, operation)                                                          \
    for (size_t i = 0; i < (number); i++) {                                                                    \
        type *left = (type *)(result) + i, right = ((const type *)(part))[i];                                  \
        if ((operation) == SUM || (operation) == AVG) *left += right;                                          \
        else if ((operation) == PROD) *left *= right;                                                          \
        else if ((operation) == MAX ? right > *left : right < *left) *left = right;                            \
    }

/* Add (or ...) one rank's part to the result. The types of counts, flags and losses; others keep the first rank's. */
static void reduce(void *result, const void *part, size_t number, int type, int operation) {
    switch (type) {
        case UINT8: REDUCE(uint8_t, result, part, number, operation); break;
        case INT32: REDUCE(int32_t, result, part, number, operation); break;
        case INT64: REDUCE(int64_t, result, part, number, operation); break;
        case FLOAT32: REDUCE(float, result, part, number, operation); break;
        case FLOAT64: REDUCE(double, result, part, number, operation); break;
    }
}

EXPORT int ncclAllReduce(const void *from, void *to, size_t number, int type, int operation,
                         struct communicator *comm, void *stream) {
    size_t size = number * bytes_of[type];
    note_collective("all_reduce", size, comm, stream);
    if (size * comm->ranks > SMALL) return SUCCESS;
    int known;
    char *all = malloc(size * comm->ranks);
    int status = exchange_contents(comm, from, size, all, &known);
    for (int rank = 1; known && rank < comm->ranks; rank++) reduce(all, all + rank * size, number, type, operation);
    if (known) {
        memcpy(to, all, size);
        set_known(to, size);
    }
    free(all);
    return status;
}

EXPORT int ncclBroadcast(const void *from, void *to, size_t number, int type, int root, struct communicator *comm, void *stream) {
    size_t size = number * bytes_of[type];
    note_collective("broadcast", size, comm, stream);
    if (size * comm->ranks > SMALL) return SUCCESS;
    int known;
    char *all = malloc(size * comm->ranks);
    int status = exchange_contents(comm, comm->rank == root ? from : to, size, all, &known);
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

EXPORT int ncclReduce(const void *from, void *to, size_t number, int type, int operation, int root,
                      struct communicator *comm, void *stream) {
    note_collective("reduce", number * bytes_of[type], comm, stream);
    return SUCCESS;
}

EXPORT int ncclSend(const void *from, size_t number, int type, int peer, struct communicator *comm, void *stream) {
    note_collective("send", number * bytes_of[type], comm, stream);
    return SUCCESS;
}

EXPORT int ncclRecv(void *to, size_t number, int type, int peer, struct communicator *comm, void *stream) {
    note_collective("recv", number * bytes_of[type], comm, stream);
    return SUCCESS;
}
