/* Works while descriptor 2 is a pipe without a reader, a full pipe, closed, or another file of
   the program. A message takes less than 200 ms. */
#include "guest.h"

int main(int count, char **words) {
    EXPECT(count == 2);
    int ends[2];
    EXPECT(pipe(ends) == 0);
    alarm(20);
    if (is(words[1], "broken")) EXPECT(close(ends[0]) == 0 && dup2(ends[1], 2) == 2);
    if (is(words[1], "full")) {
        char page[4096] = {0};
        EXPECT(dup2(ends[1], 2) == 2 && fcntl(2, F_SETFL, O_NONBLOCK) == 0);
        while (write(2, page, sizeof page) > 0) { }
        EXPECT(errno == EAGAIN && fcntl(2, F_SETFL, 0) == 0);
    }
    if (is(words[1], "closed")) EXPECT(close(2) == 0);
    char name[] = "/tmp/nvshare-guest-XXXXXX", contents[100] = "";
    if (is(words[1], "file")) {
        EXPECT(close(2) == 0 && mkstemp(name) == 2 && unlink(name) == 0);
        EXPECT(write(2, "record\n", 7) == 7);
    }
    begin();
    for (int i = 0; i < 20; i++) {
        work();
        milliseconds(10);
    }
    EXPECT(!is(words[1], "closed") || fcntl(2, F_GETFD) == -1);
    if (is(words[1], "file")) {
        EXPECT(pread(2, contents, sizeof contents - 1, 0) >= 0);
        if (!is(contents, "record\n")) FAIL("the file contains: %s", contents);
    }
    puts("worked");
    return 0;
}
