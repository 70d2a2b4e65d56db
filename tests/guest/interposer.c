/* An interposer like a profiler. It finds the next function with RTLD_NEXT, counts calls, and prints the count at the
   end. */
#include "guest.h"

static unsigned long mallocs;
static int inits;

void *malloc(size_t size) {
    static void *(*next)(size_t);
    if (next == NULL) next = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    mallocs++;
    return next(size);
}

int cuInit(unsigned flags) {
    int (*next)(unsigned) = (int (*)(unsigned))dlsym(RTLD_NEXT, "cuInit");
    if (next == NULL || (void *)next == (void *)cuInit) abort();
    inits++;
    return next(flags);
}

__attribute__((destructor)) static void report(void) {
    if (mallocs > 0) puts("saw malloc");
    if (inits > 0) printf("saw cuInit %d times\n", inits);
    fflush(stdout);
}
