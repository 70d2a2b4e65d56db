/* Runs with a clock that stands still, as some tools provide. The program's work continues after
   the scheduler has gone. */
#include "guest.h"

int clock_gettime(clockid_t clock, struct timespec *time) {
    (void)clock;
    *time = (struct timespec){1000, 0};
    return 0;
}

int main(void) {
    begin();
    work();
    say("begun\n");
    for (int i = 0; i < 10; i++) {
        milliseconds(200);
        work();
    }
    puts("worked");
    return 0;
}
