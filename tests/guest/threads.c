/* Four thousand threads, some of them concurrent, launch work and end. The program's memory doesn't grow with their
   number. */
#include "guest.h"

enum { AT_ONCE = 8 };

static void *worker(void *unused) {
    CHECK(cuCtxSetCurrent(context));
    launch();
    return unused;
}

static void batch(void) {
    pthread_t threads[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) EXPECT(pthread_create(&threads[i], NULL, worker, NULL) == 0);
    for (int i = 0; i < AT_ONCE; i++) EXPECT(pthread_join(threads[i], NULL) == 0);
}

static long resident(void) {
    long size, pages;
    FILE *file = fopen("/proc/self/statm", "r");
    EXPECT(file != NULL && fscanf(file, "%ld %ld", &size, &pages) == 2);
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

int main(void) {
    begin();
    load_kernel();
    for (int i = 0; i < 50; i++) batch();
    CHECK(cuCtxSynchronize());
    long before = resident();
    for (int i = 0; i < 450; i++) batch();
    CHECK(cuCtxSynchronize());
    long grown = resident() - before;
    if (grown > 1024) FAIL("grown by %ld KiB", grown);
    puts("worked");
    return 0;
}
