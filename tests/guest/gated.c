/* Loads a library whose constructor waits for the GPU. Meanwhile another thread does work that needs no GPU. */
#include "guest.h"

static pthread_barrier_t ready;

static void *beside(void *unused) {
    uint64_t at;
    size_t free, total;
    /* called before the wait, because the simulated driver takes the loader's lock in this call */
    CHECK(cuCtxSetCurrent(context));
    EXPECT(pthread_barrier_wait(&ready) <= 0);
    milliseconds(300); /* by then, the constructor waits for the GPU */
    CHECK(cuMemAlloc_v2(&at, 1 << 20));
    CHECK(cuMemGetInfo_v2(&free, &total));
    CHECK(cuMemFree_v2(at));
    say("allocated\n");
    return unused;
}

int main(int count, char **words) {
    EXPECT(count == 2);
    pthread_t thread;
    EXPECT(pthread_barrier_init(&ready, NULL, 2) == 0);
    begin();
    EXPECT(pthread_create(&thread, NULL, beside, NULL) == 0);
    EXPECT(pthread_barrier_wait(&ready) <= 0);
    if (dlopen(words[1], RTLD_NOW) == NULL) FAIL("%s", dlerror());
    EXPECT(pthread_join(thread, NULL) == 0);
    work();
    puts("worked");
    return 0;
}
