/* Redirects functions of the driver to its own, as ComfyUI's memory manager does: replaces the first 14 bytes of each
   function by a jump, and moves the replaced bytes to a page from which they continue behind the jump. */
#include "guest.h"
#include <sys/mman.h>

enum { JUMP = 14, FUNCTIONS = 5 };

static unsigned char *moved;
static int calls[FUNCTIONS];

static void jump(unsigned char *from, const void *to) {
    static const unsigned char instruction[6] = {0xff, 0x25, 0, 0, 0, 0}; /* jmp [rip], before its target */
    memcpy(from, instruction, sizeof instruction);
    memcpy(from + sizeof instruction, &to, sizeof to);
}

/* Redirects a function. Returns where the original continues to work. */
static void *redirect(int index, const char *name, const void *to) {
    unsigned char *function = dlsym(RTLD_DEFAULT, name), *original = moved + 64 * index;
    EXPECT(function != NULL);
    memcpy(original, function, JUMP);
    jump(original + JUMP, function + JUMP);
    uintptr_t page = (uintptr_t)function & ~(uintptr_t)4095;
    EXPECT(mprotect((void *)page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
    jump(function, to);
    EXPECT(mprotect((void *)page, 8192, PROT_READ | PROT_EXEC) == 0);
    return original;
}

static int (*real_alloc)(uint64_t *, size_t), (*real_free)(uint64_t), (*real_info)(size_t *, size_t *);
static int (*real_set)(uint64_t, unsigned, size_t), (*real_copy)(void *, uint64_t, size_t);

static int alloc(uint64_t *at, size_t bytes) { return calls[0]++, real_alloc(at, bytes); }
static int give(uint64_t at) { return calls[1]++, real_free(at); }
static int info(size_t *free, size_t *total) { return calls[2]++, real_info(free, total); }
static int set(uint64_t at, unsigned value, size_t count) { return calls[3]++, real_set(at, value, count); }
static int copy(void *to, uint64_t from, size_t bytes) { return calls[4]++, real_copy(to, from, bytes); }

int main(void) {
    moved = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(moved != MAP_FAILED);
    begin();
    load_kernel();
    real_alloc = redirect(0, "cuMemAlloc_v2", alloc);
    real_free = redirect(1, "cuMemFree_v2", give);
    real_info = redirect(2, "cuMemGetInfo_v2", info);
    real_set = redirect(3, "cuMemsetD32_v2", set);
    real_copy = redirect(4, "cuMemcpyDtoH_v2", copy);
    size_t free, total;
    for (int i = 0; i < 3; i++) {
        CHECK(cuMemGetInfo_v2(&free, &total));
        work();
        launch();
    }
    CHECK(cuCtxSynchronize());
    for (int i = 0; i < FUNCTIONS; i++) EXPECT(calls[i] == 3);
    puts("redirected");
    return 0;
}
