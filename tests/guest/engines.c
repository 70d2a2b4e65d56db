/* Uses a library that submits work through the driver's private functions. Built as a program, this file requests the
   functions as such a library does. Built as a library, it is such a library. */
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
