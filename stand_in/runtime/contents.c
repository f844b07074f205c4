/* Which bytes on the device are known.
 *
 * Kernels compute nothing, so what a program reads back is made up. But ranks tell each other sizes, decisions and
 * errors in small tensors that are filled on the host, sent and read at once, and those must arrive. So bytes that
 * came from the host are known for the next KNOWN_FOR operations; after that a kernel may have been meant to change them.
 * With PHANTOM_VALUES all are, since someone computes what kernels would.
 */
#include <pthread.h>
#include <string.h>
#include "phantom.h"

enum { REMEMBERED = 256, KNOWN_FOR = 32 };

static struct { uintptr_t begin; size_t size; long since; } known[REMEMBERED];
static int next;
static long now;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void one_operation_passes(void) { __atomic_add_fetch(&now, 1, __ATOMIC_RELAXED); }

void set_known(const void *pointer, size_t size) {
    if (settings()->values) return;
    pthread_mutex_lock(&lock);
    known[next].begin = (uintptr_t)pointer;
    known[next].size = size;
    known[next].since = now;
    next = (next + 1) % REMEMBERED;
    pthread_mutex_unlock(&lock);
}

void forget_known(void) {
    pthread_mutex_lock(&lock);
    memset(known, 0, sizeof known);
    pthread_mutex_unlock(&lock);
}

int is_known(const void *pointer, size_t size) {
    if (settings()->values) return 1;
    uintptr_t begin = (uintptr_t)pointer;
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < REMEMBERED && !found; i++)
        found = known[i].size && now - known[i].since < KNOWN_FOR && begin >= known[i].begin &&
                begin + size <= known[i].begin + known[i].size;
    pthread_mutex_unlock(&lock);
    return found;
}
