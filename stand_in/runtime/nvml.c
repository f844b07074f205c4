/* The few functions of NVML that torch looks up: since 2.13 expandable segments ask whether the device can share its
   memory over a fabric of NVLinks. It cannot. */
#include "phantom.h"

enum { FABRIC_NOT_SUPPORTED = 0, NVML_NOT_SUPPORTED = 3 };

/* The beginning of nvmlGpuFabricInfoV_t; in all its versions the state comes fourth. */
struct fabric_info {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
};

EXPORT int nvmlInit_v2(void) { return 0; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = CUDART_VERSION, 0; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return *device = (void *)1, 0; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *found) { return NVML_NOT_SUPPORTED; }

/* For torch's words when memory runs out. */
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *found) { return *count = 0, 0; }

EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric_info *info) {
    return info->state = FABRIC_NOT_SUPPORTED, 0;
}
