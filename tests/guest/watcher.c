/* When this library is preloaded, it prints the names of libraries that are opened with RTLD_DEEPBIND. */
#include "guest.h"

void *dlopen(const char *file, int flags) {
    void *(*next)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    if (flags & RTLD_DEEPBIND) printf("opens %s\n", file);
    return next(file, flags);
}
