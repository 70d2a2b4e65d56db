/* Code that these programs share: the part of the driver API that they use, and checks that print the failing line. */
#ifndef GUEST_H
#define GUEST_H
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int cuInit(unsigned flags);
int cuDriverGetVersion(int *version);
int cuDeviceGet(int *device, int ordinal);
int cuDeviceGetCount(int *count);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxDestroy_v2(void *context);
int cuCtxSetCurrent(void *context);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(uint64_t *at, size_t bytes);
int cuMemFree_v2(uint64_t at);
int cuMemGetInfo_v2(size_t *free, size_t *total);
int cuMemsetD32_v2(uint64_t at, unsigned value, size_t count);
int cuMemsetD32Async(uint64_t at, unsigned value, size_t count, void *stream);
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes);
int cuModuleLoadData(void **module, const void *image);
int cuModuleGetFunction(void **function, void *module, const char *name);
int cuLaunchKernel(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                   void *stream, void **params, void **extra);

/* Calls _exit, because no handler of the program may run after a failure. */
#define FAIL(...) (printf("line %d: ", __LINE__), printf(__VA_ARGS__), putchar('\n'), fflush(stdout), _exit(99))
#define EXPECT(condition) do { if (!(condition)) FAIL("not so: %s (errno %d)", #condition, errno); } while (0)
#define CHECK(call) do { int code = (call); if (code) FAIL("%s: CUDA error %d", #call, code); } while (0)

static void *context;
static void *empty_kernel;

/* Initialises CUDA and makes a context. */
static inline void begin(void) {
    int device;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuCtxCreate_v2(&context, 0, device));
}

static inline void load_kernel(void) {
    static const char image[] = ".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry empty()\n{\n  ret;\n}\n";
    void *module;
    CHECK(cuModuleLoadData(&module, image));
    CHECK(cuModuleGetFunction(&empty_kernel, module, "empty"));
}

static inline void launch(void) {
    CHECK(cuLaunchKernel(empty_kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
}

/* Allocates memory, writes it, reads it back, and frees it. */
static inline void work(void) {
    uint64_t at;
    uint32_t back = 0;
    CHECK(cuMemAlloc_v2(&at, 1 << 16));
    CHECK(cuMemsetD32_v2(at, 7, 1 << 14));
    CHECK(cuMemcpyDtoH_v2(&back, at + (1 << 15), sizeof back));
    EXPECT(back == 7);
    CHECK(cuMemFree_v2(at));
}

static inline void milliseconds(unsigned ms) {
    struct timespec rest = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR) { }
}

/* Prints without a buffer, so that the text appears whatever happens next. */
static inline void say(const char *text) {
    EXPECT(write(1, text, strlen(text)) == (ssize_t)strlen(text));
}

/* Returns the exit status of a child, or 1000 plus the signal that killed it. A child that may hang must have an alarm. */
static inline int end_of(pid_t child) {
    int status;
    while (waitpid(child, &status, 0) != child) EXPECT(errno == EINTR);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static inline int is(const char *word, const char *other) { return strcmp(word, other) == 0; }
#endif
