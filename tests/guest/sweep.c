/* Calls every named function with zeros, each in a separate child: `before` CUDA is initialised, after it is
   `initialised`, or with a `context`. Prints the result of each call, and errno after the call. */
#include "guest.h"

typedef int Call(long, long, long, long, long, long, long, long, long, long, long, long);

int main(int count, char **words) {
    EXPECT(count > 2);
    for (int i = 2; i < count; i++) {
        int ends[2];
        char answer[100] = "";
        EXPECT(pipe(ends) == 0);
        pid_t child = fork();
        EXPECT(child >= 0);
        if (child == 0) {
            alarm(10);
            if (is(words[1], "initialised")) CHECK(cuInit(0));
            if (is(words[1], "context")) begin();
            Call *call = (Call *)dlsym(RTLD_DEFAULT, words[i]);
            EXPECT(call != NULL);
            errno = 4321;
            int code = call(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            int after = errno;
            int length = sprintf(answer, "%d, errno %d", code, after);
            _exit(write(ends[1], answer, length) != length);
        }
        close(ends[1]);
        if (read(ends[0], answer, sizeof answer - 1) < 0) FAIL("read: %d", errno);
        close(ends[0]);
        int ended = end_of(child);
        if (ended >= 1000) sprintf(answer, "signal %d", ended - 1000);
        printf("%s %s\n", words[i], answer);
        fflush(stdout);
    }
    /* No driver is initialised here; the call only links the program to the driver. */
    return cuDriverGetVersion((int[1]){0});
}
