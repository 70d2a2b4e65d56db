/* Built as a library, requests the driver's private functions, as libraries do that submit work
   through those functions. Built as a program, opens that library and works. */
#include "guest.h"

#ifndef ENGINE
int main(int count, char **words) {
    uint64_t at;
    EXPECT(count == 2 || count == 3);
    begin();
    CHECK(cuMemAlloc_v2(&at, 1 << 22));
    void *engine = dlopen(words[1], RTLD_NOW);
    EXPECT(engine != NULL);
    int (*start)(void) = (int (*)(void))dlsym(engine, "start");
    EXPECT(start != NULL);
    CHECK(start());
    work();
    puts("worked");
    fflush(stdout);
    sleep(count == 3 ? atoi(words[2]) : 0);
    return 0;
}
#else
int cuGetExportTable(const void **table, const void *id);

int start(void) {
    static const char id[16] = "an engine";
    const void *table;
    return cuGetExportTable(&table, id);
}
#endif
