/* When preloaded, it makes the loader seem to lack dlsym, as for a library loaded before libdl. */
#include <stddef.h>

void *dlvsym(void *handle, const char *name, const char *version) {
    (void)handle, (void)name, (void)version;
    return NULL;
}
