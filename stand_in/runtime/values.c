/* With PHANTOM_VALUES kernels still compute nothing, but the operators that launch them are computed in Python
 * (values/). A launch that belongs to no such operator is a stray: its result is missing, and its name is kept.
 */
#include <pthread.h>
#include <string.h>
#include "phantom.h"

enum { STRAYS = 256 };
static struct { const char *name; long times; } strays[STRAYS];
static void (*on_stray)(const char *);
static __thread int covered;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* For Python: what this thread launches from now on is computed by someone, until as many calls with 0. */
EXPORT void phantom_cover(int on) { covered += on ? 1 : -1; }
EXPORT void phantom_on_stray(void (*callback)(const char *)) { on_stray = callback; }

int is_covered(void) { return covered; }

/* The name of a stray kernel and how often it was launched; NULL after the last. */
EXPORT const char *phantom_stray(int index, long *times) {
    if (index >= STRAYS) return NULL;
    *times = strays[index].times;
    return strays[index].name;
}

/* bitsandbytes fills the states of paged optimizers by a function of its library: kfunc<unsigned char, FILL>. */
static int fills(const char *name, void **arguments) {
    if (!arguments || strcmp(name, "_Z5kfuncIhLi0EEvPT_S1_S0_l")) return 0;
    memset(*(void **)arguments[0], *(unsigned char *)arguments[2], *(long *)arguments[3]);
    return 1;
}

void stray_unless_covered(const char *name, void **arguments) {
    if (!settings()->values || covered || fills(name, arguments)) return;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < STRAYS - 1 && strays[i].name && strays[i].name != name) i++;
    strays[i].name = name;
    strays[i].times++;
    pthread_mutex_unlock(&lock);
    if (on_stray) on_stray(name);
}
