/* A minimal driver. The driver opens no file, creates no thread and has no thread-local
   variables, so a test attributes every file and thread that the program itself hasn't created
   to libnvshare.so. The driver's only GPU uses the host's memory and completes all work
   immediately. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED };

static int initialised;
static uintptr_t current = 1;

#define ANSWER return initialised ? SUCCESS : NOT_INITIALIZED

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : (initialised = 1, SUCCESS); }
int cuDriverGetVersion(int *version) { return *version = 12000, SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; ANSWER; }
int cuDeviceGetCount(int *count) { *count = 1; ANSWER; }
int cuDeviceGetName(char *name, int length, int device) { (void)device; strncpy(name, "Bare GPU", length); ANSWER; }
int cuDeviceGetUuid(void *uuid, int device) { (void)device; memset(uuid, 0xba, 16); ANSWER; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = 1 << 28; ANSWER; }
/* All attributes are 0, except the one that $BARE_ATTRIBUTE sets: "number=value". The driver
   knows the attributes below $BARE_ATTRIBUTES only, if it is set. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    const char *set = getenv("BARE_ATTRIBUTE"), *known = getenv("BARE_ATTRIBUTES");
    (void)device;
    if (known && attribute >= atoi(known)) return INVALID_VALUE;
    *value = set && atoi(set) == attribute ? atoi(strchr(set, '=') + 1) : 0;
    ANSWER;
}
int cuCtxCreate_v2(void **context, unsigned flags, int device) { (void)flags, (void)device; *context = &current; ANSWER; }
int cuCtxDestroy_v2(void *context) { (void)context; ANSWER; }
int cuCtxSetCurrent(void *context) { (void)context; ANSWER; }
int cuCtxGetCurrent(void **context) { *context = &current; ANSWER; }
int cuCtxPushCurrent_v2(void *context) { (void)context; ANSWER; }
int cuCtxPopCurrent_v2(void **context) { if (context) *context = &current; ANSWER; }
int cuCtxGetDevice(int *device) { *device = 0; ANSWER; }
int cuCtxSynchronize(void) { ANSWER; }
int cuMemAlloc_v2(uint64_t *at, size_t bytes) { *at = (uintptr_t)malloc(bytes); return *at ? SUCCESS : OUT_OF_MEMORY; }
int cuMemFree_v2(uint64_t at) { free((void *)at); ANSWER; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = 1 << 28; ANSWER; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)from, bytes); ANSWER; }
int cuMemsetD32_v2(uint64_t at, unsigned value, size_t count) { while (count-- > 0) ((unsigned *)at)[count] = value; ANSWER; }
int cuMemsetD32Async(uint64_t at, unsigned value, size_t count, void *stream) { (void)stream; return cuMemsetD32_v2(at, value, count); }
int cuModuleLoadData(void **module, const void *image) { (void)image; *module = &current; ANSWER; }
int cuModuleGetFunction(void **function, void *module, const char *name) { (void)module, (void)name; *function = &current; ANSWER; }
int cuLaunchKernel(void *function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned shared,
                   void *stream, void **params, void **extra) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)shared, (void)stream, (void)params, (void)extra;
    return function ? SUCCESS : INVALID_VALUE;
}
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = &current; ANSWER; }
int cuEventDestroy_v2(void *event) { (void)event; ANSWER; }
int cuEventQuery(void *event) { (void)event; ANSWER; }
int cuEventRecord(void *event, void *stream) { (void)event, (void)stream; ANSWER; }
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = &current; ANSWER; }
int cuStreamDestroy_v2(void *stream) { (void)stream; ANSWER; }
int cuStreamQuery(void *stream) { (void)stream; ANSWER; }
int cuStreamSynchronize(void *stream) { (void)stream; ANSWER; }
int cuStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; ANSWER; }
int cuThreadExchangeStreamCaptureMode(int *mode) { (void)mode; ANSWER; }
