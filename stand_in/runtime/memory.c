/* Allocations are address space that no one pays for until it is touched, up to the device's memory; copies. */
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <sys/mman.h>
#include "phantom.h"

struct range { uintptr_t begin; size_t size; enum range_kind kind; int device; };

static struct range *ranges;
static int count, capacity;
static size_t used, peak; /* bytes of this process, which works on one device */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add_range(const void *pointer, size_t size, enum range_kind kind, int device) {
    pthread_mutex_lock(&lock);
    if (count == capacity) {
        capacity = capacity ? 2 * capacity : 1024;
        ranges = realloc(ranges, capacity * sizeof *ranges);
        if (!ranges) abort();
    }
    ranges[count++] = (struct range){(uintptr_t)pointer, size, kind, device};
    pthread_mutex_unlock(&lock);
}

static struct range find_range(const void *pointer) {
    struct range found = {0, 0, UNKNOWN, 0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count && !found.kind; i++)
        if ((uintptr_t)pointer - ranges[i].begin < ranges[i].size) found = ranges[i];
    pthread_mutex_unlock(&lock);
    return found;
}

enum range_kind kind_of(const void *pointer) { return find_range(pointer).kind; }

void *reserve_range(size_t size, enum range_kind kind, int device) {
    size = size ? size : 1;
    void *made = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return NULL;
    add_range(made, size, kind, device);
    return made;
}

static size_t forget_range(const void *pointer) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (int i = count - 1; i >= 0 && !size; i--)
        if (ranges[i].begin == (uintptr_t)pointer) {
            size = ranges[i].size;
            ranges[i] = ranges[--count];
        }
    pthread_mutex_unlock(&lock);
    return size;
}

size_t release_range(const void *pointer) {
    size_t size = forget_range(pointer);
    if (size) munmap((void *)pointer, size);
    return size;
}

int take_memory(size_t size) {
    pthread_mutex_lock(&lock);
    int fits = used + size <= settings()->memory;
    if (fits) used += size;
    if (used > peak) peak = used;
    pthread_mutex_unlock(&lock);
    return fits;
}

void give_memory(size_t size) {
    pthread_mutex_lock(&lock);
    used -= size;
    pthread_mutex_unlock(&lock);
}

/* For Python: bytes that cudaMalloc and cuMemCreate hold now, and the most since the last reset. */
EXPORT void phantom_memory(long long *now_and_peak, int reset_peak) {
    pthread_mutex_lock(&lock);
    now_and_peak[0] = (long long)used;
    now_and_peak[1] = (long long)peak;
    if (reset_peak) peak = used;
    pthread_mutex_unlock(&lock);
}

/* ---- device memory */

EXPORT cudaError_t cudaMalloc(void **pointer, size_t size) {
    *pointer = NULL;
    cudaError_t error = begin_unsafe_call();
    if (error) return error;
    if (!take_memory(size)) return cudaErrorMemoryAllocation;
    *pointer = reserve_range(size, DEVICE, current_device());
    if (!*pointer) {
        give_memory(size);
        return cudaErrorMemoryAllocation;
    }
    note(MALLOC, "cudaMalloc", size, NULL, 0, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void *pointer) {
    cudaError_t error = begin_unsafe_call();
    if (error || !pointer) return error;
    size_t size = release_range(pointer);
    if (!size) return cudaErrorInvalidValue;
    give_memory(size);
    note(FREE, "cudaFree", size, NULL, 0, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) { return cudaMalloc(pointer, size); }
EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

EXPORT cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    *total = settings()->memory;
    *unused = *total - used;
    return cudaSuccess;
}

/* Managed memory (bitsandbytes' paged optimizers) moves to the host when the device is full: it is not counted. */
EXPORT cudaError_t cudaMallocManaged(void **pointer, size_t size, unsigned flags) {
    cudaError_t error = begin_unsafe_call();
    if (error) return error;
    *pointer = reserve_range(size, PINNED, current_device());
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t size, struct cudaMemLocation location,
                                        unsigned flags, cudaStream_t stream) {
    return cudaSuccess;
}

/* ---- pinned host memory */

EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    cudaError_t error = begin_unsafe_call();
    if (error) return error;
    *pointer = reserve_range(size, PINNED, current_device());
    note(PIN, "cudaHostAlloc", size, NULL, 0, 0);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaFreeHost(void *pointer) {
    cudaError_t error = begin_unsafe_call();
    if (error) return error;
    return release_range(pointer) ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    cudaError_t error = begin_unsafe_call();
    if (error) return error;
    if (kind_of(pointer)) return cudaErrorHostMemoryAlreadyRegistered;
    add_range(pointer, size, REGISTERED, current_device());
    note(PIN, "cudaHostRegister", size, NULL, 0, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *pointer) {
    cudaError_t error = begin_unsafe_call();
    if (error) return error;
    return forget_range(pointer) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    struct range range = find_range(pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = range.kind == DEVICE ? cudaMemoryTypeDevice
                       : range.kind         ? cudaMemoryTypeHost
                                            : cudaMemoryTypeUnregistered;
    attributes->device = range.device;
    attributes->devicePointer = range.kind ? (void *)pointer : NULL;
    attributes->hostPointer = range.kind > DEVICE ? (void *)pointer : NULL;
    return cudaSuccess;
}

/* ---- copies */

/* Zeros on the host; where they are many, pages of shared memory are given back, so that they take none. */
static void write_zeros(char *to, size_t size) {
    uintptr_t page = 4096, begin = ((uintptr_t)to + page - 1) & -page, end = ((uintptr_t)to + size) & -page;
    if (size <= SMALL || madvise((void *)begin, end - begin, MADV_REMOVE)) {
        memset(to, 0, size);
        return;
    }
    memset(to, 0, begin - (uintptr_t)to);
    memset((void *)end, 0, (uintptr_t)to + size - end);
}

/* What arrives: with PHANTOM_VALUES all; else known bytes as they are; one byte that is not known as 1 (a comparison is true); else zeros. */
void move_contents(void *to, const void *from, size_t size, int direction) {
    if (settings()->values) {
        memmove(to, from, size);
        return;
    }
    int known = size <= SMALL && (direction == TO_DEVICE || direction == ON_HOST || is_known(from, size));
    one_operation_passes();
    if (direction == ON_HOST || (direction == TO_HOST && known && size > 1)) memcpy(to, from, size);
    else if (direction == TO_HOST && size == 1) *(char *)to = 1;
    else if (direction == TO_HOST) write_zeros(to, size);
    else if (size <= SMALL) memcpy(to, from, size);
    if (known && direction != TO_HOST) set_known(to, size);
}

static cudaError_t copy(void *to, const void *from, size_t size, cudaStream_t stream, int is_async, const char *name) {
    if (!size) return cudaSuccess;
    enum range_kind to_kind = kind_of(to), from_kind = kind_of(from);
    int direction = to_kind == DEVICE ? (from_kind == DEVICE ? ON_DEVICE : TO_DEVICE)
                                      : (from_kind == DEVICE ? TO_HOST : ON_HOST);
    int pinned = direction == TO_DEVICE ? from_kind != UNKNOWN : direction == TO_HOST ? to_kind != UNKNOWN : 1;
    /* The driver stages a pageable source and goes on; a pageable target it fills before it returns. */
    int blocking = !is_async || (direction == TO_HOST && !pinned);
    struct graph *graph = NULL;
    cudaError_t error = is_async ? begin_work(stream, &graph) : begin_blocking_copy();
    if (error) return error;
    if (graph && !pinned) return refuse_work(stream);
    if (graph) {
        if (is_covered()) add_node(graph, (struct node){.kind = NODE_KERNEL});
        else add_node(graph, (struct node){NODE_COPY, to, from, size, direction});
        return cudaSuccess;
    }
    move_contents(to, from, size, direction);
    note(COPY, name, size, stream, direction | (pinned ? COPY_PINNED : 0) | (blocking ? COPY_BLOCKING : 0), 0);
    if (blocking) note_sync(name, stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return copy(to, from, size, NULL, 0, "cudaMemcpy");
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, size, stream, 1, "cudaMemcpyAsync");
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                       cudaStream_t stream) {
    return copy(to, from, size, stream, 1, "cudaMemcpyPeerAsync");
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) {
        cudaError_t status = copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, stream, 1,
                                  "cudaMemcpy2DAsync");
        if (status) return status;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                                      enum cudaMemcpyKind kind) {
    return begin_blocking_copy();
}

EXPORT cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char any_symbol[SMALL];
    *pointer = any_symbol;
    return cudaSuccess;
}

void set_contents(void *to, int value, size_t size) {
    if (size <= SMALL || settings()->values) memset(to, value, size);
}

EXPORT cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream) {
    struct graph *graph;
    cudaError_t error = begin_work(stream, &graph);
    if (error) return error;
    if (graph) {
        if (is_covered()) add_node(graph, (struct node){.kind = NODE_KERNEL});
        else add_node(graph, (struct node){NODE_SET, pointer, NULL, size, value});
        return cudaSuccess;
    }
    one_operation_passes();
    set_contents(pointer, value, size);
    note(MEMSET, "cudaMemsetAsync", size, stream, 0, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void *pointer, int value, size_t size) { return cudaMemsetAsync(pointer, value, size, NULL); }

/* ---- memory pools and memory of other processes: there, but never used by our programs */

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(uint64_t *)value = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t number) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t size) { return cudaSuccess; }
