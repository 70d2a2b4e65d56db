/* An allocator that looks like jemalloc to other libraries. It replaces malloc and its family. In the first call it finds
   the C library's functions with dlsym, and serves dlsym's own allocations from a static buffer. */
#include "guest.h"

static void *(*next_malloc)(size_t), *(*next_calloc)(size_t, size_t), *(*next_realloc)(void *, size_t);
static void (*next_free)(void *);
/* Reading this variable must not allocate. */
static __thread int looking __attribute__((tls_model("initial-exec")));
static char early[1 << 16] __attribute__((aligned(16)));
static size_t used;

static void *from_buffer(size_t size) {
    size_t at = __atomic_fetch_add(&used, (size + 15) & ~(size_t)15, __ATOMIC_RELAXED);
    return at + size <= sizeof early ? early + at : NULL;
}

static int is_early(void *at) { return (char *)at >= early && (char *)at < early + sizeof early; }

static void look(void) {
    looking = 1;
    next_calloc = (void *(*)(size_t, size_t))dlsym(RTLD_NEXT, "calloc");
    next_realloc = (void *(*)(void *, size_t))dlsym(RTLD_NEXT, "realloc");
    next_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    next_malloc = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    looking = 0;
}

/* Fills the memory, so that memory that is read before it is written isn't zero by chance. */
void *malloc(size_t size) {
    if (next_malloc == NULL && !looking) look();
    void *at = looking || next_malloc == NULL ? from_buffer(size) : next_malloc(size);
    return at != NULL ? memset(at, 0xa5, size) : NULL;
}

void *calloc(size_t count, size_t size) {
    if (next_malloc == NULL && !looking) look();
    return looking || next_malloc == NULL ? from_buffer(count * size) : next_calloc(count, size);
}

void *realloc(void *old, size_t size) {
    if (old == NULL) return malloc(size);
    if (!is_early(old)) return next_realloc(old, size);
    void *at = malloc(size);
    size_t room = early + sizeof early - (char *)old;
    return at != NULL ? memcpy(at, old, size < room ? size : room) : NULL;
}

void free(void *at) {
    if (at != NULL && !is_early(at)) next_free(at);
}
