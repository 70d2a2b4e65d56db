/* launches COUNT: launches that many empty kernels and says how many nanoseconds each took.
   launches COUNT ROUNDS: after that, for `between_signals` (tests/support/src/steps.rs), so many rounds with a launch, as many with a
   memset of nothing, and as many with a launch to the default stream: in each round a signal, another, the call, a signal. */
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
    for (int i = 0; i < 300; i++) launch(&context, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0); /* look-ups, the window */
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
    for (long i = 0; i < 2048; i++) launch(&context, 1, 1, 1, 1, 1, 1, 0, NULL, 0, 0); /* it is known then */
    for (long i = 0; i < rounds; i++) {
        MARK, MARK;
        launch(&context, 1, 1, 1, 1, 1, 1, 0, NULL, 0, 0);
        MARK;
    }
    return 0;
}
