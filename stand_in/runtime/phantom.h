/* What the files of the stand-in share. ../README.md says what it is and which environment variables it reads. */
#ifndef PHANTOM_H
#define PHANTOM_H

#include <stddef.h>
#include <stdint.h>
#include <cuda_runtime_api.h>

#define EXPORT __attribute__((visibility("default")))

/* Contents of at most this many bytes are really copied, exchanged between ranks and read back. What ranks tell each
 * other about a checkpoint is the longest: 400 bytes of each adapter matrix and rank. */
#define SMALL (1 << 18)

/* ---- settings.c: what the environment asks for, read once */

struct settings {
    size_t memory;             /* bytes of one device: PHANTOM_GIB */
    int devices;               /* PHANTOM_DEVICES, less what CUDA_VISIBLE_DEVICES hides */
    int cc_major, cc_minor;    /* PHANTOM_CC */
    const char *exchange_dir;  /* PHANTOM_DIR: where ranks leave their messages */
    int exchange_seconds;      /* PHANTOM_NCCL_SECONDS: how long a rank waits for another one's */
    long nccl_calls_until_failure; /* PHANTOM_NCCL_FAIL=CALLS[:CODE[:TEXT]], -1: never */
    int nccl_failure;
    const char *nccl_failure_text;
    int values;                /* PHANTOM_VALUES: all bytes move, and operators are computed (../values) */
    size_t cudnn;              /* PHANTOM_CUDNN: the version that it says, 0: none */
};

const struct settings *settings(void);

/* ---- recorder.c: what was called, in its order. counts.py mirrors `struct record` and the numbers. */

enum operation { KERNEL, GEMM, MEMSET, COPY, SYNC, COLLECTIVE, MALLOC, FREE, PIN, EVENT_RECORD, EVENT_WAIT, GRAPH };

/* The detail of a COPY: one of the directions, plus the flags. */
enum { TO_DEVICE, TO_HOST, ON_DEVICE, ON_HOST, COPY_DIRECTIONS = 3, COPY_PINNED = 4, COPY_BLOCKING = 8 };

struct record {
    const char *name;    /* of the kernel, the call or the collective */
    long long size;      /* bytes; multiply-adds of a GEMM; kernels and copies of a GRAPH */
    long long host_ns;   /* CPU time of the process so far */
    uint64_t stream;
    int operation;
    int detail;          /* COPY: see above; COLLECTIVE: number of the communicator, in order of creation;
                            GRAPH: number of its capture */
    int ranks;           /* COLLECTIVE: size of the communicator */
    int place;           /* what the place callback returned for it, else -1 */
};

/* Does nothing unless a recording is on. */
void note(enum operation operation, const char *name, long long size, const void *stream, int detail, int ranks);

/* The host waits for `stream`, or for all of them: EVERYTHING. A second wait of the same thread with nothing between
   them waits for nothing and is not noted: torch's blocking copies to pageable memory wait twice. */
void note_sync(const char *name, const void *stream);
#define EVERYTHING ((void *)-1)

int is_recording(void);

/* ---- memory.c: address ranges */

enum range_kind { UNKNOWN, DEVICE, PINNED, REGISTERED };

enum range_kind kind_of(const void *pointer);
/* Address space that costs no memory until it is touched; NULL when there is none. */
void *reserve_range(size_t size, enum range_kind kind, int device);
/* Returns the bytes of the range that began at `pointer`, 0 if there was none. */
size_t release_range(const void *pointer);
/* Count `size` bytes as used on the current device; 0 if they are not there. */
int take_memory(size_t size);
void give_memory(size_t size);

/* ---- contents.c: which bytes on the device are known */

void one_operation_passes(void);
void set_known(const void *pointer, size_t size);
int is_known(const void *pointer, size_t size);
void forget_known(void);

/* ---- memory.c: what copies and memsets do to the bytes */

void move_contents(void *to, const void *from, size_t size, int direction);
void set_contents(void *to, int value, size_t size);

/* ---- captures.c: each is called before what it is named after, which is left undone where it returns an error. */

struct graph;

/* Work is given to `stream`. If the stream is captured, `graph` is where it goes instead of being done, else NULL. */
cudaError_t begin_work(const void *stream, struct graph **graph);
/* This work cannot be captured. */
cudaError_t refuse_work(const void *stream);
int is_capturing(const void *stream);
/* A call that a capture would not notice, such as an allocation. */
cudaError_t begin_unsafe_call(void);
/* The host waits for, or asks about, `stream`, or all of them: EVERYTHING. */
cudaError_t begin_wait(const void *stream);
cudaError_t begin_blocking_copy(void);
cudaError_t begin_record(const void *event, const void *stream, int *is_captured);
cudaError_t begin_event_wait(const void *event, const void *stream, int is_external, int *is_captured);
cudaError_t begin_event_query(const void *event);
void forget_event(const void *event);

/* ---- graphs.c */

enum node_kind { NODE_KERNEL, NODE_COPY, NODE_SET, NODE_COMPUTE };

struct node {
    enum node_kind kind;
    void *to;
    const void *from;
    size_t size;
    int number; /* COPY: direction; SET: value; COMPUTE: of the operator */
};

struct graph *make_graph(unsigned long long id);
void drop_graph(struct graph *graph);
void add_node(struct graph *graph, struct node node);

/* ---- streams.c */

int is_legacy(const void *stream);
int is_blocking(const void *stream); /* waits for the legacy stream, and is waited for */

/* ---- values.c */

/* Whether someone computes what this thread launches. */
int is_covered(void);

/* Kernels and matrix products say with this that they were launched. */
void stray_unless_covered(const char *name, void **arguments);

/* ---- device.c */

int current_device(void);
/* Returns `error`, which cudaGetLastError also returns once in this thread: how a launch tells of its failure. */
cudaError_t keep_error(cudaError_t error);

/* ---- driver.c */

/* The function of the CUDA driver API with this name. */
void *driver_function(const char *name);

#endif
