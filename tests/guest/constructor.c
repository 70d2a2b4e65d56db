/* A library that uses CUDA while it is being loaded. */
#include "guest.h"

__attribute__((constructor)) static void construct(void) {
    EXPECT(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") != NULL);
    work();
    say("constructed\n");
}
