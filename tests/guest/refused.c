/* Works while a filter refuses one system call (EPERM), as in containers and sandboxes. The filter is installed `before`
   or `after` CUDA is initialised. */
#include "guest.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

static const struct { const char *name; unsigned number; } calls[] = {
    {"membarrier", SYS_membarrier}, {"socket", SYS_socket},     {"connect", SYS_connect}, {"eventfd2", SYS_eventfd2},
    {"sendto", SYS_sendto},         {"recvfrom", SYS_recvfrom}, {"ppoll", SYS_ppoll},     {"prctl", SYS_prctl},
    {"sched_yield", SYS_sched_yield},
};

static void refuse(const char *name) {
    unsigned i = 0;
    while (!is(calls[i].name, name)) EXPECT(++i < sizeof calls / sizeof *calls);
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i].number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    /* The filter applies to every thread, including the library's threads. */
    EXPECT(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
}

int main(int count, char **words) {
    EXPECT(count == 3);
    alarm(20);
    if (is(words[2], "before")) refuse(words[1]);
    begin();
    work();
    if (is(words[2], "after")) refuse(words[1]);
    for (int i = 0; i < 20; i++) {
        work();
        milliseconds(5);
    }
    puts("worked");
    return 0;
}
