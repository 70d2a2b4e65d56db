/* Works with descriptors 0 to 2 closed. A guest that had one of these descriptors would receive
   the program's own output. So the program writes to a file whether a guest has them. */
#include "guest.h"

int main(int count, char **words) {
    EXPECT(count == 2);
    begin();
    work();
    FILE *result = fopen(words[1], "w");
    for (int fd = 0; fd < 3; fd++) {
        char path[32], target[100] = "";
        sprintf(path, "/proc/self/fd/%d", fd);
        if (readlink(path, target, sizeof target - 1) > 0 && (strstr(target, "socket:") || strstr(target, "anon_inode:")))
            fprintf(result, "descriptor %d is %.*s\n", fd, 6, target);
    }
    fputs("worked\n", result);
    return fclose(result);
}
