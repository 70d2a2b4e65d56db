/* A library that uses CUDA and is linked to the driver. */
#include "guest.h"

void use_cuda(int rounds) {
    begin();
    while (rounds-- > 0) work();
}

uint64_t allocate(void) {
    uint64_t at;
    CHECK(cuMemAlloc_v2(&at, 1 << 16));
    return at;
}

void finish(void) { CHECK(cuCtxDestroy_v2(context)); }
