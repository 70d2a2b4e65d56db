/* Skips syncs, like libeatmydata. It interposes open and fsync, and finds the originals with dlsym when it is loaded. */
#include "guest.h"
#include <stdarg.h>

static int (*next_open)(const char *, int, ...), (*next_open64)(const char *, int, ...);

__attribute__((constructor)) static void look(void) {
    if (next_open != NULL) return;
    next_open = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    next_open64 = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
}

/* Other libraries open files before this library's constructor has run. */
#define OPEN(name)                                                       \
    int name(const char *path, int flags, ...) {                         \
        va_list rest;                                                    \
        va_start(rest, flags);                                           \
        mode_t mode = va_arg(rest, mode_t);                              \
        va_end(rest);                                                    \
        look();                                                          \
        return next_##name(path, flags & ~(O_SYNC | O_DSYNC), mode);     \
    }

OPEN(open)
OPEN(open64)

int fsync(int fd) { return fcntl(fd, F_GETFD) == -1 ? -1 : 0; }
int fdatasync(int fd) { return fsync(fd); }
