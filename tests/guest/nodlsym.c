/* When this library is preloaded, the loader seems to lack dlsym, as it does to a library loaded before libdl. */
#include <stddef.h>

void *dlvsym(void *handle, const char *name, const char *version) {
    (void)handle, (void)name, (void)version;
    return NULL;
}
