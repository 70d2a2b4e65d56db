/* A plain CUDA program. The given number of threads work and check their results. */
#include "guest.h"

static void *worker(void *unused) {
    CHECK(cuCtxSetCurrent(context));
    for (int round = 0; round < 20; round++) {
        work();
        launch();
        char *memory = malloc(100 + round * 1000);
        memset(memory, round, 100);
        free(memory);
    }
    return unused;
}

int main(int count, char **words) {
    int threads = count == 2 ? atoi(words[1]) : 1;
    pthread_t thread[16];
    EXPECT(threads <= 16);
    begin();
    load_kernel();
    for (int i = 0; i < threads; i++) EXPECT(pthread_create(&thread[i], NULL, worker, NULL) == 0);
    for (int i = 0; i < threads; i++) EXPECT(pthread_join(thread[i], NULL) == 0);
    CHECK(cuCtxSynchronize());
    size_t free, total;
    CHECK(cuMemGetInfo_v2(&free, &total));
    EXPECT(free <= total);
    CHECK(cuCtxDestroy_v2(context));
    puts("worked");
    return 0;
}
