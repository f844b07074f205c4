/* The environment, read once. */
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include "phantom.h"

static struct settings values;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const char *text(const char *name, const char *fallback) {
    const char *value = getenv(name);
    return value && *value ? value : fallback;
}

/* "" and "-1" hide all devices, as with the real runtime; a list shows that many. */
static int visible_of(int devices) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) return devices;
    if (!*list || *list == '-') return 0;
    int listed = 1;
    for (; *list; list++) listed += *list == ',';
    return listed < devices ? listed : devices;
}

static void read_nccl_failure(void) {
    values.nccl_calls_until_failure = -1;
    values.nccl_failure = 1; /* ncclUnhandledCudaError */
    values.nccl_failure_text = "Cuda failure 2 'out of memory'";
    const char *wanted = getenv("PHANTOM_NCCL_FAIL");
    if (!wanted || !*wanted) return;
    char *rest;
    values.nccl_calls_until_failure = strtol(wanted, &rest, 10);
    if (*rest != ':') return;
    values.nccl_failure = (int)strtol(rest + 1, &rest, 10);
    if (*rest == ':') values.nccl_failure_text = rest + 1;
}

static void read_environment(void) {
    int cc = atoi(text("PHANTOM_CC", "86"));
    values.memory = (size_t)(atof(text("PHANTOM_GIB", "24")) * (1 << 30));
    values.devices = visible_of(atoi(text("PHANTOM_DEVICES", "1")));
    values.cc_major = cc / 10;
    values.cc_minor = cc % 10;
    values.exchange_dir = text("PHANTOM_DIR", "/dev/shm");
    values.exchange_seconds = atoi(text("PHANTOM_NCCL_SECONDS", "600"));
    values.values = atoi(text("PHANTOM_VALUES", "0"));
    values.cudnn = (size_t)atol(text("PHANTOM_CUDNN", "0"));
    read_nccl_failure();
}

const struct settings *settings(void) {
    pthread_once(&once, read_environment);
    return &values;
}
