/* A library that obtains the driver as a CUDA runtime does: it opens the driver and looks up every function itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef OWN
/* This variant defines functions with these names itself. */
void *dlsym(void *handle, const char *name) { return handle == NULL && name[0] == '1' ? (void *)name : NULL; }
int cuInit(unsigned flags) { return 40 + (int)flags; }
int (*const table[])(unsigned) = {cuInit};
int own(void) { return table[0](2) + (dlsym(NULL, "1") != NULL ? 100 : 0) + (dlsym(NULL, "cuInit") != NULL ? 1000 : 0); }
#else
static int (*address_of)(const char *, void **, int, uint64_t, void *);
static void *context;

static void *look_up(const char *name) {
    void *found = NULL;
    if (address_of(name, &found, 12000, 0, NULL) != 0 || found == NULL) {
        printf("no %s\n", name);
        _Exit(98);
    }
    return found;
}

#define CALL(name, types, ...) do { int code = ((int (*)types)look_up(#name))(__VA_ARGS__); \
    if (code != 0) { printf("%s: CUDA error %d\n", #name, code); fflush(stdout); _Exit(97); } } while (0)

void use_cuda(int rounds) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int device = 0;
    if (driver != NULL) address_of = (int (*)(const char *, void **, int, uint64_t, void *))dlsym(driver, "cuGetProcAddress_v2");
    if (address_of == NULL) _Exit(96);
    CALL(cuInit, (unsigned), 0);
    CALL(cuDeviceGet, (int *, int), &device, 0);
    CALL(cuDevicePrimaryCtxRetain, (void **, int), &context, device);
    CALL(cuCtxSetCurrent, (void *), context);
    while (rounds-- > 0) {
        uint64_t at = 0;
        uint32_t back = 0;
        CALL(cuMemAlloc, (uint64_t *, size_t), &at, 1 << 16);
        CALL(cuMemsetD32, (uint64_t, unsigned, size_t), at, 7, 1 << 14);
        CALL(cuMemcpyDtoH, (void *, uint64_t, size_t), &back, at + (1 << 15), sizeof back);
        CALL(cuMemFree, (uint64_t), at);
        if (back != 7) _Exit(95);
    }
}

void finish(void) { CALL(cuDevicePrimaryCtxRelease, (int), 0); }

#ifdef CONSTRUCT
/* Submits no work, because the simulated driver would start a thread for that work, and the
   new thread needs the loader's lock. */
__attribute__((constructor)) static void construct(void) { use_cuda(0); }
#endif
#endif
