/* Becomes a daemon in the standard way, with every descriptor closed, and works as the daemon. Its output is written to
   a pipe. `plain`: without CUDA. `cuda`: with CUDA in the daemon. `late`: CUDA is initialised before the fork, and used
   only in the daemon. */
#include "guest.h"
#include <sys/stat.h>

enum { REPORT = 100 };

static void daemonise(void) {
    pid_t child = fork();
    EXPECT(child >= 0);
    if (child > 0) _exit(0);
    EXPECT(setsid() >= 0);
    child = fork();
    EXPECT(child >= 0);
    if (child > 0) _exit(0);
    umask(0);
    EXPECT(chdir("/") == 0);
    for (int fd = 0; fd < REPORT; fd++) close(fd);
    for (int fd = 0; fd < 3; fd++) EXPECT(open("/dev/null", O_RDWR) == fd);
    EXPECT(dup2(REPORT, 1) == 1);
}

int main(int count, char **words) {
    EXPECT(count == 2);
    int ends[2];
    EXPECT(pipe(ends) == 0 && dup2(ends[1], REPORT) == REPORT && close(ends[1]) == 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        close(ends[0]);
        int late = is(words[1], "late");
        if (late) begin();
        daemonise();
        if (is(words[1], "cuda")) {
            begin();
            work();
        }
        /* CUDA that was initialised before the fork doesn't work, but no call hangs. */
        uint64_t at = 0;
        if (late) printf("cuInit %d, cuMemAlloc %d\n", cuInit(0), cuMemAlloc_v2(&at, 4096));
        puts("a daemon");
        return 0;
    }
    close(REPORT);
    EXPECT(end_of(child) == 0);
    char text[200];
    for (ssize_t n; (n = read(ends[0], text, sizeof text)) > 0;) EXPECT(write(1, text, n) == n);
    return 0;
}
