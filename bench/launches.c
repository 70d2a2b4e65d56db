/* launches COUNT: launches COUNT empty kernels and prints the mean time of a launch in nanoseconds.
   launches COUNT ROUNDS: afterwards runs ROUNDS rounds with a launch, ROUNDS with an empty memset, and ROUNDS with a
   launch to the default stream. Each round sends two signals, makes the call, and sends a third signal.
   `between_signals` (tests/support/src/steps.rs) counts the instructions between signals. */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define MARK raise(SIGUSR1)

int main(int argc, char **argv) {
    long count = argc > 1 ? atol(argv[1]) : 0, rounds = argc > 2 ? atol(argv[2]) : 0;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context, *stream = (void *)0x1000;
    if (!cuda) return 2;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
    int (*create)(void **, unsigned, int) = (int (*)(void **, unsigned, int))dlsym(cuda, "cuCtxCreate_v2");
    int (*set)(unsigned long, unsigned, size_t, void *) = (int (*)(unsigned long, unsigned, size_t, void *))dlsym(cuda, "cuMemsetD32Async");
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) =
        (int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))dlsym(cuda, "cuLaunchKernel");
    if (init(0) || create(&context, 0, 0)) return 3;
    for (int i = 0; i < 300; i++) launch(&context, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0); /* warm-up */
    set(0, 0, 0, stream);
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (long i = 0; i < count; i++) launch(&context, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
    clock_gettime(CLOCK_MONOTONIC, &b);
    printf("%f\n", count ? ((b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec)) / count : 0);
    for (long i = 0; i < rounds; i++) {
        MARK, MARK;
        launch(&context, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
        MARK;
    }
    for (long i = 0; i < rounds; i++) {
        MARK, MARK;
        set(0, 0, 0, stream);
        MARK;
    }
    for (long i = 0; i < 2048; i++) launch(&context, 1, 1, 1, 1, 1, 1, 0, NULL, 0, 0); /* warm-up of the default stream */
    for (long i = 0; i < rounds; i++) {
        MARK, MARK;
        launch(&context, 1, 1, 1, 1, 1, 1, 0, NULL, 0, 0);
        MARK;
    }
    return 0;
}
