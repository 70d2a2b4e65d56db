/* Looks up functions, and initialises CUDA, before main. */
#include "guest.h"

static int (*init)(unsigned);

__attribute__((constructor(101))) static void early(void) {
    EXPECT(dlsym(RTLD_DEFAULT, "malloc") != NULL && dlsym(RTLD_NEXT, "strlen") != NULL);
    init = (int (*)(unsigned))dlsym(RTLD_DEFAULT, "cuInit");
    EXPECT(init != NULL && dlsym(RTLD_DEFAULT, "cuNoSuchCall") == NULL);
    CHECK(init(0));
}

__attribute__((constructor)) static void later(void) {
    begin();
    work();
}

int main(void) {
    work();
    puts("worked");
    return 0;
}
