/* Preloaded, it makes the loader look as if it had no dlsym, as to a library that came before libdl. */
#include <stddef.h>

void *dlvsym(void *handle, const char *name, const char *version) {
    (void)handle, (void)name, (void)version;
    return NULL;
}
