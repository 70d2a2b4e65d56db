/* Opens libraries with RTLD_DEEPBIND. Such libraries resolve symbols in their own dependencies
   before preloaded libraries. The program is not linked to the driver. */
#include "guest.h"
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>

static const char *path;
static char **arguments;

static void *open_it(int how) {
    void *library = dlopen(path, how | RTLD_LOCAL | RTLD_DEEPBIND);
    if (library == NULL) FAIL("%s", dlerror());
    return library;
}

static void use(void *library, int rounds) {
    void (*use)(int) = (void (*)(int))dlsym(library, "use_cuda");
    void (*finish)(void) = (void (*)(void))dlsym(library, "finish");
    EXPECT(use != NULL && finish != NULL);
    use(rounds);
    finish();
}

static void *open_and_close(void *unused) {
    for (int i = 0; i < 100; i++) {
        void *library = open_it(i % 2 ? RTLD_NOW : RTLD_LAZY);
        EXPECT(dlsym(library, "use_cuda") != NULL && dlsym(library, "no_such_function") == NULL);
        EXPECT(dlclose(library) == 0);
        if (i % 10 == 0) EXPECT(dlopen("libcuda.so.1", RTLD_LAZY) != NULL);
    }
    return unused;
}

static uintptr_t from, to;

static int find(struct dl_phdr_info *info, size_t size, void *name) {
    (void)size;
    if (info->dlpi_name == NULL || strstr(info->dlpi_name, name) == NULL) return 0;
    from = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_LOAD) to = info->dlpi_addr + header->p_vaddr + header->p_memsz;
    }
    return 1;
}

/* Makes the kernel refuse to make the library's pages writable, as a security policy may. */
static void refuse(const char *library) {
    EXPECT(dl_iterate_phdr(find, (void *)library) == 1);
    /* The filter needs addresses with the same upper half. The next start has other addresses. */
    if (from >> 32 != to >> 32) {
        execv("/proc/self/exe", arguments);
        FAIL("cannot start again: %s", strerror(errno));
    }
    uint32_t high = from >> 32, first = (uint32_t)from, last = (uint32_t)to;
#define FIELD(name, half) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, name) + 4 * (half))
    struct sock_filter filter[] = {
        FIELD(nr, 0), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 0, 8),
        FIELD(args[2], 0), BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_WRITE, 0, 6),
        FIELD(args[0], 1), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, high, 0, 4),
        FIELD(args[0], 0), BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, first, 0, 2),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, last, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 13),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    EXPECT(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
}

static int descriptors(void) {
    int number = 0;
    DIR *all = opendir("/proc/self/fd");
    while (readdir(all) != NULL) number++;
    closedir(all);
    return number;
}

int main(int count, char **words) {
    EXPECT(count == 3);
    arguments = words;
    const char *how = words[1];
    path = words[2];
    if (is(how, "now")) use(open_it(RTLD_NOW), 3);
    if (is(how, "lazy")) use(open_it(RTLD_LAZY), 3);
    if (is(how, "constructor")) open_it(RTLD_NOW);
    if (is(how, "driver-first")) {
        EXPECT(dlopen("libcuda.so.1", RTLD_NOW) != NULL);
        use(open_it(RTLD_NOW), 3);
    }
    if (is(how, "driver-deep")) {
        EXPECT(dlopen("libcuda.so.1", RTLD_NOW | RTLD_DEEPBIND) != NULL);
        use(open_it(RTLD_NOW), 3);
    }
    if (is(how, "driver-late")) {
        void *library = open_it(RTLD_LAZY);
        EXPECT(dlopen("libcuda.so.1", RTLD_NOW) != NULL);
        use(library, 3);
    }
    if (is(how, "refused")) {
        /* The program already uses CUDA, and has memory. */
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        uint64_t at;
        EXPECT(driver != NULL);
        CHECK(((int (*)(unsigned))dlsym(driver, "cuInit"))(0));
        CHECK(((int (*)(void **, unsigned, int))dlsym(driver, "cuCtxCreate_v2"))(&context, 0, 0));
        CHECK(((int (*)(uint64_t *, size_t))dlsym(driver, "cuMemAlloc_v2"))(&at, 1 << 22));
        refuse("/libcuda.so");
        use(open_it(RTLD_NOW), 3);
    }
    if (is(how, "look-up")) {
        /* The program looks up every function with its own handle of the driver, also those that
           libnvshare.so doesn't hook. */
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_DEEPBIND);
        EXPECT(driver != NULL);
#define CALL(name, ...) CHECK(((int (*)())dlsym(driver, name))(__VA_ARGS__))
        int device;
        uint64_t at;
        uint32_t back = 0;
        CALL("cuInit", 0);
        CALL("cuDeviceGet", &device, 0);
        CALL("cuDevicePrimaryCtxRetain", &context, device);
        CALL("cuCtxSetCurrent", context);
        CALL("cuMemAlloc_v2", &at, (size_t)1 << 22);
        CALL("cuMemsetD32_v2", at, 7, (size_t)1 << 20);
        CALL("cuMemcpyDtoH_v2", &back, at, sizeof back);
        EXPECT(back == 7);
    }
    if (is(how, "own")) {
        /* The library still uses its own definitions. */
        int (*own)(void) = (int (*)(void))dlsym(open_it(RTLD_NOW), "own");
        EXPECT(own != NULL);
        printf("%d\n", own());
        EXPECT(dlopen("libcuda.so.1", RTLD_NOW) != NULL);
        printf("%d\n", own());
    }
    if (is(how, "threads")) {
        pthread_t threads[6];
        int before = descriptors();
        for (int i = 0; i < 6; i++) EXPECT(pthread_create(&threads[i], NULL, open_and_close, NULL) == 0);
        for (int i = 0; i < 6; i++) EXPECT(pthread_join(threads[i], NULL) == 0);
        EXPECT(descriptors() == before);
    }
    puts("worked");
    return 0;
}
