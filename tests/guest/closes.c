/* Closes descriptors that it doesn't know, as careful programs do, and reuses their numbers.
   With `range` or `each`, it closes all descriptors from 3 up, and uses no CUDA afterwards. With
   `socket` or `file`, it closes the descriptors that a guest has opened besides the driver's
   files, puts packet sockets or files in their place, and continues to use CUDA. */
#include "guest.h"
#include <sys/socket.h>
#include <sys/stat.h>

enum { MOST = 1024 };

/* Finds sockets and event descriptors. They belong to a guest, because the simulated driver
   opens only files. */
static int find(int *found) {
    int count = 0;
    for (int fd = 3; fd < MOST; fd++) {
        char path[32], target[100] = "";
        sprintf(path, "/proc/self/fd/%d", fd);
        if (readlink(path, target, sizeof target - 1) > 0 && (strstr(target, "socket:") || strstr(target, "anon_inode:")))
            found[count++] = fd;
    }
    return count;
}

static void work_for_a_while(void) {
    for (int i = 0; i < 100; i++) {
        work();
        milliseconds(5);
    }
}

int main(int count, char **words) {
    EXPECT(count == 2);
    struct stat before, after;
    static int theirs[MOST], mine[MOST][2], n;
    alarm(20);
    begin();
    work();
    if (is(words[1], "range") || is(words[1], "each")) {
        if (is(words[1], "range")) EXPECT(syscall(SYS_close_range, 3, ~0U, 0) == 0);
        else for (int fd = 3; fd < 1024; fd++) close(fd);
        /* The pipes reuse the closed numbers. */
        int pipes[8][2];
        for (int i = 0; i < 8; i++) EXPECT(pipe(pipes[i]) == 0);
        clock_t before_rest = clock();
        milliseconds(300);
        /* No thread may busy-wait for a descriptor. */
        if ((clock() - before_rest) * 1000 / CLOCKS_PER_SEC > 100) FAIL("somebody is busy");
        for (int i = 0; i < 8; i++) {
            char byte = 0;
            EXPECT(write(pipes[i][1], "x", 1) == 1 && read(pipes[i][0], &byte, 1) == 1 && byte == 'x');
            EXPECT(fcntl(pipes[i][0], F_SETFL, O_NONBLOCK) == 0 && read(pipes[i][0], &byte, 1) == -1);
        }
        puts("closed");
        fflush(stdout);
        _exit(0);
    }
    n = find(theirs);
    /* Without such descriptors, the rest would test nothing. */
    EXPECT(n > 0 || getenv("LD_PRELOAD") == NULL);
    for (int i = 0; i < n; i++) {
        if (is(words[1], "socket")) {
            EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, mine[i]) == 0);
        } else {
            mine[i][0] = open("/tmp", O_TMPFILE | O_RDWR, 0600);
            mine[i][1] = dup(mine[i][0]);
        }
        EXPECT(mine[i][0] >= 0 && mine[i][1] >= 0 && dup2(mine[i][0], theirs[i]) == theirs[i] && close(mine[i][0]) == 0);
    }
    for (int i = 0; i < n; i++) EXPECT(write(mine[i][1], "twelve bytes", 12) == 12);
    work_for_a_while();
    for (int i = 0; i < n; i++) {
        char text[100];
        if (fstat(theirs[i], &after) != 0) FAIL("my descriptor was closed");
        EXPECT(fstat(mine[i][1], &before) == 0);
        if (is(words[1], "socket")) {
            if (recv(theirs[i], text, sizeof text, MSG_DONTWAIT) != 12) FAIL("my packet was taken");
            if (recv(mine[i][1], text, sizeof text, MSG_DONTWAIT) != -1) FAIL("a packet came that I have not sent");
        } else {
            EXPECT(before.st_ino == after.st_ino);
            if (after.st_size != 12 || pread(theirs[i], text, 12, 0) != 12 || memcmp(text, "twelve bytes", 12) != 0)
                FAIL("my file has changed");
        }
    }
    puts("worked");
    return 0;
}
