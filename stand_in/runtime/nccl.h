/* What the files of NCCL share: nccl.c has communicators and exchanges, collectives.c the operations, reductions.c sums. */
#ifndef PHANTOM_NCCL_H
#define PHANTOM_NCCL_H

#include "phantom.h"

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { SUM, PROD, MAX, MIN, AVG, FIRST_SCALED_SUM };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 };

struct communicator {
    int ranks, rank, number;
    long exchanges;
    char id[96];
    long *sent, *received; /* messages to and from each rank so far */
};

size_t size_of(size_t number, int type);

/* ---- nccl.c */

/* Remember `text` as the last error, and return `status`. */
int fail(int status, const char *text);
/* Exchange device memory: every rank's `size` bytes, one after the other, to `all`. Returns with *known set when every
   rank's bytes were known (contents.c). */
int exchange_contents(struct communicator *comm, const void *mine, size_t size, char *all, int *known);
int send_message(struct communicator *comm, int to, const void *message, size_t size);
int receive_message(struct communicator *comm, int from, void *message, size_t size);

/* ---- reductions.c */

/* The sum (or ...) of `ranks` parts that are `stride` bytes apart, into the first of them. The others are scratch. */
void reduce(char *parts, size_t stride, int ranks, size_t number, int type, int operation);

#endif
