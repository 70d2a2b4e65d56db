/* Exhausts its descriptors, address space or threads, and prints the driver's answers. This happens before CUDA is
   initialised, or afterwards with `-after`. */
#include "guest.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static void limit(int what, rlim_t value) {
    struct rlimit limit = {value, value};
    EXPECT(setrlimit(what, &limit) == 0);
}

static rlim_t address_space(void) {
    unsigned long pages;
    FILE *file = fopen("/proc/self/statm", "r");
    EXPECT(file != NULL && fscanf(file, "%lu", &pages) == 1);
    fclose(file);
    return pages * sysconf(_SC_PAGESIZE);
}

/* Forbids new threads like RLIMIT_NPROC, which doesn't apply to root. */
static void no_threads(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

int main(int count, char **words) {
    EXPECT(count == 2);
    const char *what = words[1];
    int after = strstr(what, "-after") != NULL;
    int device = -1, code = 0;
    uint64_t at = 0;
    alarm(20);
    if (after) {
        begin();
        work();
    }
    if (strncmp(what, "files", 5) == 0) limit(RLIMIT_NOFILE, 3);
    if (strncmp(what, "space", 5) == 0) limit(RLIMIT_AS, address_space() + (after ? 0 : 300 << 10));
    if (strncmp(what, "threads", 7) == 0) no_threads();
    if (!after) {
        code = cuInit(0);
        printf("cuInit %d, cuDeviceGet %d\n", code, cuDeviceGet(&device, 0));
        if (code == 0) printf("cuCtxCreate %d\n", code = cuCtxCreate_v2(&context, 0, 0));
    }
    if (code == 0) {
        printf("cuMemAlloc %d\n", code = cuMemAlloc_v2(&at, 1 << 20));
        if (code == 0) {
            printf("cuMemset %d\n", cuMemsetD32_v2(at, 1, 1 << 18));
            printf("cuMemFree %d\n", cuMemFree_v2(at));
        }
    }
    printf("cuCtxSynchronize %d\n", cuCtxSynchronize());
    return 0;
}
