/* Opens libraries by name, both from the program and from a library with its own search path. Prints the loader's
   messages. */
#include "guest.h"

#ifdef OUTER
#define WHO "outer"
#else
#define WHO "program"
#endif

void finds(const char *name) {
    static const int flags[] = {RTLD_NOW, RTLD_LAZY | RTLD_DEEPBIND, RTLD_NOW | RTLD_NOLOAD};
    for (int i = 0; i < 3; i++) {
        errno = 7;
        void *library = dlopen(name, flags[i]);
        int code = errno;
        const char *said = dlerror();
        printf("%s by %s: %s\n", name ? name : "itself", WHO, library != NULL ? "found" : said ? said : "nothing");
        EXPECT(dlerror() == NULL && (library == NULL || code == 7));
        if (library != NULL) EXPECT(dlclose(library) == 0);
    }
}

#ifndef OUTER
int main(int count, char **words) {
    EXPECT(count == 2);
    void *outer = dlopen(words[1], RTLD_NOW);
    if (outer == NULL) FAIL("%s", dlerror());
    void (*by_outer)(const char *) = (void (*)(const char *))dlsym(outer, "finds");
    EXPECT(by_outer != NULL && by_outer != finds);
    static const char *const names[] = {NULL, "", "libdeeper.so", "libfinds.so", "/no/such.so", "libno-such.so", "/etc/passwd"};
    for (int i = 0; i < 7; i++) {
        finds(names[i]);
        by_outer(names[i]);
    }
    return 0;
}
#endif
