/* NCCL's communicators, and how bytes pass between the ranks: through files.
 *
 * In an exchange each rank leaves one file and reads those of all others; a message has a file of its own. The host
 * waits for them, which real NCCL does not do; a rank that does not come is an error after PHANTOM_NCCL_SECONDS.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "nccl.h"

enum { NO_COLOR = -1, POLL_MICROSECONDS = 200 };

struct unique_id { char text[128]; };
/* NCCL's callers may look at a communicator's first bytes: keep them ours, and the block large. */
enum { COMMUNICATOR_SIZE = 4096, KEPT_FILES = 2 };

static char last_error[256];

int fail(int status, const char *text) {
    snprintf(last_error, sizeof last_error, "%s", text);
    return status;
}

/* ---- exchanges */

enum { PATH = 512 };

static int leave(const char *path, const void *message, size_t size) {
    char unfinished[PATH + 8];
    snprintf(unfinished, sizeof unfinished, "%s.part", path);
    FILE *file = fopen(unfinished, "wb");
    if (!file) return 0;
    int written = fwrite(message, 1, size, file) == size;
    return !fclose(file) && written && !rename(unfinished, path);
}

static int collect(const char *path, void *message, size_t size) {
    long polls = settings()->exchange_seconds * (1000000L / POLL_MICROSECONDS);
    FILE *file;
    while (!(file = fopen(path, "rb")) && polls-- > 0) usleep(POLL_MICROSECONDS);
    if (!file) return 0;
    int whole = fread(message, 1, size, file) == size && fgetc(file) == EOF;
    fclose(file);
    return whole;
}

static void path_of(char *path, const struct communicator *comm, long exchange, int rank) {
    snprintf(path, PATH, "%s/phantom_%s_%ld_%d", settings()->exchange_dir, comm->id, exchange, rank);
}

/* Every rank's `size` bytes, one after the other, to `all`. */
static int exchange(struct communicator *comm, const void *mine, size_t size, char *all) {
    char path[PATH];
    if (comm->ranks == 1) return memcpy(all, mine, size), SUCCESS;
    path_of(path, comm, comm->exchanges, comm->rank);
    if (!leave(path, mine, size)) return fail(SYSTEM_ERROR, "phantom: PHANTOM_DIR cannot be written");
    for (int rank = 0; rank < comm->ranks; rank++) {
        path_of(path, comm, comm->exchanges, rank);
        if (!collect(path, all + rank * size, size))
            return fail(REMOTE_ERROR, "phantom: another rank did not come, or came with another size");
    }
    path_of(path, comm, comm->exchanges - KEPT_FILES, comm->rank); /* all have read it: they were here since */
    unlink(path);
    comm->exchanges++;
    return SUCCESS;
}

int exchange_contents(struct communicator *comm, const void *mine, size_t size, char *all, int *known) {
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

/* ---- messages from rank to rank */

static void path_between(char *path, const struct communicator *comm, int from, int to, long number) {
    snprintf(path, PATH, "%s/phantom_%s_from%d_to%d_%ld", settings()->exchange_dir, comm->id, from, to, number);
}

/* The sender leaves its message and goes on. */
int send_message(struct communicator *comm, int to, const void *message, size_t size) {
    char path[PATH];
    path_between(path, comm, comm->rank, to, comm->sent[to]++);
    return leave(path, message, size) ? SUCCESS : fail(SYSTEM_ERROR, "phantom: PHANTOM_DIR cannot be written");
}

int receive_message(struct communicator *comm, int from, void *message, size_t size) {
    char path[PATH];
    path_between(path, comm, from, comm->rank, comm->received[from]++);
    if (!collect(path, message, size)) return fail(REMOTE_ERROR, "phantom: another rank did not send, or another size");
    unlink(path);
    return SUCCESS;
}

/* ---- communicators */

static int make(struct communicator **made, int ranks, int rank, const char *id) {
    static int number;
    *made = calloc(1, COMMUNICATOR_SIZE);
    (*made)->ranks = ranks;
    (*made)->rank = rank;
    (*made)->number = __atomic_fetch_add(&number, 1, __ATOMIC_RELAXED);
    snprintf((*made)->id, sizeof (*made)->id, "%s", id);
    (*made)->sent = calloc(ranks, sizeof(long));
    (*made)->received = calloc(ranks, sizeof(long));
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
EXPORT int ncclMemAlloc(void **pointer, size_t size) { return cudaMalloc(pointer, size) ? 1 : SUCCESS; }
EXPORT int ncclMemFree(void *pointer) { return cudaFree(pointer) ? 1 : SUCCESS; }
EXPORT const char *ncclGetLastError(struct communicator *comm) { return last_error; }

EXPORT const char *ncclGetErrorString(int error) {
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process exited or there was a network error"};
    return error >= 0 && error <= REMOTE_ERROR ? texts[error] : "unknown result code";
}
