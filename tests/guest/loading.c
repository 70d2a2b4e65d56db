/* Has memory on the GPU and idles, while one of its threads runs the constructor of a library that it loads. */
#include "guest.h"

#define BYTES (150UL << 20)

static void *load(void *path) {
    if (dlopen(path, RTLD_NOW) == NULL) FAIL("%s", dlerror());
    return NULL;
}

int main(int count, char **words) {
    EXPECT(count == 2);
    pthread_t thread;
    uint64_t at;
    uint32_t back = 0;
    begin();
    CHECK(cuMemAlloc_v2(&at, BYTES));
    /* The memory has several values, because memory of one repeated value is evicted without a copy. */
    for (uint64_t offset = 0; offset < BYTES; offset += 1 << 20)
        CHECK(cuMemsetD32_v2(at + offset, (unsigned)(offset >> 20), 1 << 18));
    CHECK(cuCtxSynchronize());
    EXPECT(pthread_create(&thread, NULL, load, words[1]) == 0);
    EXPECT(pthread_join(thread, NULL) == 0);
    for (uint64_t offset = 0; offset < BYTES; offset += 1 << 20) {
        CHECK(cuMemcpyDtoH_v2(&back, at + offset, sizeof back));
        EXPECT(back == offset >> 20);
    }
    CHECK(cuMemFree_v2(at));
    puts("worked");
    return 0;
}
