/* Receives frequent signals while it works, initialises CUDA (`early`) or waits for the GPU. The
   program also receives signals that only its own threads may take. */
#include "guest.h"
#include <sys/time.h>

static volatile sig_atomic_t handled;
static int at_the_gate;

static void handler(int signal) {
    (void)signal;
    if (++handled == 100 && at_the_gate) say("100 signals\n");
}

static void often(int on) {
    struct itimerval timer = {{0, on * 200}, {0, on * 200}};
    struct sigaction action = {.sa_handler = handler}; /* no SA_RESTART */
    EXPECT(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

int main(int count, char **words) {
    EXPECT(count == 2);
    const char *how = words[1];
    if (is(how, "timer") || is(how, "early")) {
        if (is(how, "early")) often(1);
        begin();
        load_kernel();
        often(1);
        for (int i = 0; handled < 300; i++) {
            work();
            launch();
        }
        often(0);
    }
    if (is(how, "gate")) {
        begin();
        at_the_gate = 1;
        often(1);
        work();
        often(0);
    }
    if (is(how, "wait")) {
        begin(); /* no signal is blocked yet */
        sigset_t all, pending;
        sigfillset(&all);
        EXPECT(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0);
        /* The signal is sent to the process, and kills it if any thread has not blocked the signal. */
        for (int signal = 1; signal < 32; signal++) {
            int taken = 0;
            if (signal == SIGKILL || (signal >= SIGCONT && signal <= SIGTTOU)) continue; /* SIGKILL cannot be blocked, and the others stop or continue the process */
            EXPECT(kill(getpid(), signal) == 0);
            milliseconds(2);
            EXPECT(sigpending(&pending) == 0 && sigismember(&pending, signal));
            EXPECT(sigwait(&all, &taken) == 0 && taken == signal);
        }
        work();
    }
    if (is(how, "blocked")) {
        begin();
        work();
        int threads = 0;
        DIR *tasks = opendir("/proc/self/task");
        for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
            char path[300], line[300], name[100] = "";
            unsigned long long blocked = 0;
            snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
            FILE *status = fopen(path, "r");
            while (status != NULL && fgets(line, sizeof line, status) != NULL) {
                sscanf(line, "Name: %99s", name);
                sscanf(line, "SigBlk: %llx", &blocked);
            }
            if (status != NULL) fclose(status);
            if (!is(name, "nvshare")) continue;
            threads++;
            /* All signals must be blocked except SIGKILL, SIGSTOP and the two that the C library uses itself. */
            unsigned long long not = 1ULL << (SIGKILL - 1) | 1ULL << (SIGSTOP - 1) | 3ULL << 31;
            if ((blocked | not) != ~0ULL) FAIL("blocked are only %llx", blocked);
        }
        EXPECT(threads == 1);
        puts("one thread, which blocks every signal");
        return 0;
    }
    puts("worked");
    return 0;
}
