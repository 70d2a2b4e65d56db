/* While it uses CUDA, starts another CUDA program in every possible way, or replaces itself by that program. */
#include "guest.h"
#include <spawn.h>

extern char **environ;

int main(int count, char **words) {
    EXPECT(count == 3);
    const char *how = words[1];
    char *arguments[] = {words[2], "2", NULL};
    pid_t child;
    begin();
    work();
    if (is(how, "vfork")) {
        for (int i = 0; i < 5; i++) {
            child = vfork();
            if (child == 0) {
                execv(words[2], arguments);
                _exit(9);
            }
            EXPECT(end_of(child) == 0);
        }
    } else if (is(how, "spawn")) {
        for (int i = 0; i < 5; i++) {
            EXPECT(posix_spawn(&child, words[2], NULL, NULL, arguments, environ) == 0);
            EXPECT(end_of(child) == 0);
        }
    } else if (is(how, "system")) {
        char command[4096];
        snprintf(command, sizeof command, "%s 1 | cat", words[2]);
        EXPECT(system(command) == 0);
    } else if (is(how, "descriptors")) {
        /* The child inherits none of the library's descriptors. */
        EXPECT(system("for fd in /proc/self/fd/*; do readlink \"$fd\"; done | grep -E '^(socket|anon_inode):'") != 0);
    } else {
        execv(words[2], arguments);
        return 9;
    }
    work();
    puts("worked");
    return 0;
}
