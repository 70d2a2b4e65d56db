/* Launches a kernel with a driver function that nvshare doesn't know. */
#include "guest.h"

typedef int Launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, void *status);

int main(int count, char **words) {
    EXPECT(count == 2);
    uint64_t at;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *asked = NULL, *again = NULL;
    begin();
    load_kernel();
    CHECK(cuMemAlloc_v2(&at, 1 << 22));
    Launch *found = (Launch *)dlsym(driver, "cuUnheardOfLaunch");
    CHECK(cuGetProcAddress_v2("cuUnheardOfLaunch", &asked, 12000, 0, NULL));
    CHECK(cuGetProcAddress_v2("cuUnheardOfLaunch", &again, 12000, 2, NULL)); /* per-thread */
    EXPECT(found != NULL && asked == (void *)found && again != NULL && again != asked);
    EXPECT(dlsym(driver, "cuUnheardOfLaunch") == (void *)found && dlsym(driver, "cuUnheardOf") == NULL);
    if (is(words[1], "called")) {
        errno = 7;
        for (int i = 0; i < 3; i++) CHECK(found(empty_kernel, 2, 3, 4, 5, 6, 7, 0, NULL, NULL, NULL));
        CHECK(((Launch *)again)(empty_kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
        EXPECT(errno == 7 && found(NULL, 2, 3, 4, 5, 6, 7, 0, NULL, NULL, NULL) != 0);
        CHECK(cuCtxSynchronize());
    }
    work();
    CHECK(cuMemFree_v2(at));
    puts("worked");
    return 0;
}
