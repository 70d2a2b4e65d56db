/* Looks functions up in a signal handler. The process's first look-up is in the handler, and
   many later look-ups interrupt the program. (If the program itself looked functions up at that
   time, the C library's dlsym could deadlock, even without nvshare.) */
#include "guest.h"
#include <sys/time.h>

static volatile sig_atomic_t handled;
static volatile double sum;

static void handler(int signal) {
    (void)signal;
    handled++;
    EXPECT(dlsym(RTLD_DEFAULT, "cuInit") != NULL && dlsym(RTLD_DEFAULT, "strlen") != NULL);
}

int main(void) {
    struct sigaction action = {.sa_handler = handler};
    struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    alarm(20); /* SIGALRM is not handled, so it ends a program that hangs */
    EXPECT(cuDriverGetVersion((int[1]){0}) == 0);
    EXPECT(sigaction(SIGVTALRM, &action, NULL) == 0 && raise(SIGVTALRM) == 0 && setitimer(ITIMER_VIRTUAL, &often, NULL) == 0);
    while (handled < 50) sum += 1;
    EXPECT(setitimer(ITIMER_VIRTUAL, &never, NULL) == 0);
    begin();
    work();
    puts("worked");
    return 0;
}
