/* The recording: one record per call, kept in memory until Python reads it (counts.py). */
#include <stdlib.h>
#include <pthread.h>
#include <time.h>
#include "phantom.h"

typedef int (*place_callback)(void);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct record *records;
static size_t count, capacity;
static volatile int recording;
static place_callback find_place;
static __thread struct { int operation; const void *stream; } last = {-1, 0};
static __thread int without_places;

static long long host_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int is_recording(void) { return recording; }

/* Python is asked only where a line is worth its time: waits, and copies between host and device. It takes
   Python's lock, so never call this with a lock of ours held. */
static int place_of(enum operation operation, int detail) {
    if (without_places) return -1;
    int wanted = operation == SYNC || (operation == COPY && (detail & COPY_DIRECTIONS) != ON_DEVICE);
    return wanted && find_place ? find_place() : -1;
}

void note(enum operation operation, const char *name, long long size, const void *stream, int detail, int ranks) {
    if (!recording) return;
    last.operation = operation;
    last.stream = stream;
    struct record made = {name, size, host_ns(), (uint64_t)(uintptr_t)stream, operation, detail, ranks,
                          place_of(operation, detail)};
    pthread_mutex_lock(&lock);
    if (count == capacity) {
        capacity = capacity ? 2 * capacity : 1 << 14;
        records = realloc(records, capacity * sizeof *records);
        if (!records) abort();
    }
    records[count++] = made;
    pthread_mutex_unlock(&lock);
}

void note_sync(const char *name, const void *stream) {
    if (last.operation == SYNC && (last.stream == stream || last.stream == EVERYTHING)) return;
    note(SYNC, name, 0, stream, 0, 0);
}

/* ---- for Python */

EXPORT void phantom_start(place_callback place) {
    find_place = place;
    last.operation = -1;
    recording = 1;
}

EXPORT void phantom_stop(void) {
    recording = 0;
    find_place = NULL;
}

/* For this thread: torch's allocator waits for the device with its lock held, for which a thread with Python's
   lock may wait. */
EXPORT void phantom_without_places(int value) { without_places = value; }

EXPORT void phantom_clear(void) {
    pthread_mutex_lock(&lock);
    count = 0;
    pthread_mutex_unlock(&lock);
}

EXPORT long long phantom_count(void) { return (long long)count; }

/* Copy the records first, first + 1, ... to `out`: the array itself moves when it grows. */
EXPORT void phantom_read(struct record *out, long long first, long long number) {
    pthread_mutex_lock(&lock);
    for (long long i = 0; i < number && first + i < (long long)count; i++) out[i] = records[first + i];
    pthread_mutex_unlock(&lock);
}
