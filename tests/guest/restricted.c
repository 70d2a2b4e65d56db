/* Initialises CUDA, gives up the right to open files in one way, and only then makes its context and works. */
#include "guest.h"
#include <grp.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/stat.h>

static void drop_privileges(void) {
    const unsigned nobody = 65534;
    EXPECT(setgroups(0, NULL) == 0 && setresgid(nobody, nobody, nobody) == 0);
    EXPECT(setresuid(nobody, nobody, nobody) == 0);
}

/* Refuses the system calls that open a file, in every thread. */
static void filter(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
#ifdef SYS_open
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_open, 3, 0),
#else
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 3, 0),
#endif
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat2, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    EXPECT(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
}

/* Forbids the calling thread to open any file or directory. */
static void landlock(void) {
    const struct landlock_ruleset_attr none = {
        .handled_access_fs =
            LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_READ_DIR,
    };
    int rules = syscall(SYS_landlock_create_ruleset, &none, sizeof none, 0);
    if (rules < 0) {
        puts("no Landlock");
        exit(0);
    }
    EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && syscall(SYS_landlock_restrict_self, rules, 0) == 0);
    close(rules);
}

/* Makes an empty directory the root. */
static void leave(void) {
    char directory[] = "/tmp/nvshare-empty-XXXXXX";
    EXPECT(mkdtemp(directory) != NULL && chdir(directory) == 0 && rmdir(directory) == 0 && chroot(".") == 0);
}

int main(int count, char **words) {
    static const struct { const char *name; void (*act)(void); } ways[] = {
        {"user", drop_privileges}, {"seccomp", filter}, {"landlock", landlock}, {"chroot", leave},
    };
    unsigned i = 0;
    int device;
    EXPECT(count == 3);
    alarm(60);
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    while (!is(ways[i].name, words[1])) EXPECT(++i < sizeof ways / sizeof *ways);
    ways[i].act();
    EXPECT(open(words[2], O_RDWR) < 0);
    CHECK(cuCtxCreate_v2(&context, 0, device));
    for (int round = 0; round < 20; round++) {
        work();
        milliseconds(5);
    }
    puts("worked");
    return 0;
}
