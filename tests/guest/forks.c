/* Forks while it uses CUDA. */
#include "guest.h"

static volatile int end;

static void *busy(void *unused) {
    CHECK(cuCtxSetCurrent(context));
    while (!end) {
        work();
        free(malloc(1 << 12));
    }
    return unused;
}

/* Runs a function in a forked child, which is killed if it hangs. */
static int child(int (*run)(void)) {
    fflush(stdout);
    pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        alarm(10);
        _exit(run());
    }
    return end_of(pid);
}

static int exits(void) { exit(0); }

static int calls(void) {
    uint64_t at = 0;
    size_t free = 0, total = 0;
    unsigned back = 0;
    printf("child: %d", cuInit(0));
    printf(" %d", cuCtxSynchronize());
    printf(" %d", cuMemAlloc_v2(&at, 4096));
    printf(" %d", cuMemGetInfo_v2(&free, &total));
    printf(" %d", cuMemsetD32_v2(0x1000, 0, 1));
    printf(" %d", cuMemcpyDtoH_v2(&back, 0x1000, 4));
    printf(" %d", cuMemFree_v2(0x1000));
    printf(" %d\n", cuCtxDestroy_v2(context));
    fflush(stdout);
    return 0;
}

static int stormed(void) {
    void *memory = malloc(1 << 16);
    memset(memory, 1, 1 << 16);
    free(memory);
    uint64_t at;
    return cuInit(0) == 0 || cuMemAlloc_v2(&at, 4096) == 0 || dlsym(RTLD_DEFAULT, "cuMemFree_v2") == NULL;
}

/* Fork handlers like a runtime's. They allocate, and the parent's handlers call the driver. */
static int handled[3];
static void in_any(int which) {
    handled[which]++;
    free(malloc(1000));
    free(calloc(10, 1000));
}
static void prepare(void) { in_any(0); work(); }
static void in_parent(void) { in_any(1); work(); }
static void in_child(void) { in_any(2); cuCtxSynchronize(); }
static int handlers(void) { return handled[2] != 10; }

int main(int count, char **words) {
    EXPECT(count == 2);
    const char *how = words[1];
    if (is(how, "handlers"))
        for (int i = 0; i < 5; i++) EXPECT(pthread_atfork(prepare, in_parent, in_child) == 0);
    begin();
    work();
    if (is(how, "handlers")) {
        for (int i = 0; i < 5; i++) EXPECT(pthread_atfork(prepare, in_parent, in_child) == 0);
        for (int i = 0; i < 20; i++) EXPECT(child(handlers) == 0);
        printf("%d %d\n", handled[0], handled[1]);
    } else if (is(how, "outlives")) {
        pid_t pid = fork();
        if (pid == 0) {
            for (int fd = 0; fd < 3; fd++) close(fd);
            alarm(60);
            pause();
            _exit(0);
        }
        printf("%d\n", pid);
        return 0;
    } else if (is(how, "storm")) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++) EXPECT(pthread_create(&threads[i], NULL, busy, NULL) == 0);
        for (int i = 0; i < 400; i++) {
            int ended = child(stormed);
            if (ended != 0) FAIL("child %d ended with %d", i, ended);
        }
        end = 1;
        for (int i = 0; i < 4; i++) EXPECT(pthread_join(threads[i], NULL) == 0);
        puts("400 children");
        return 0;
    } else {
        for (int i = 0; i < 10; i++) {
            EXPECT(child(is(how, "exits") ? exits : calls) == 0);
            work();
        }
    }
    work();
    puts("worked");
    return 0;
}
