/* Exits in the way that the argument selects. */
#include "guest.h"

static const char *how;
static uint64_t kept;
static pthread_key_t key;

static void free_and_destroy(void) {
    work();
    CHECK(cuMemFree_v2(kept));
    CHECK(cuCtxDestroy_v2(context));
    say("destroyed\n");
}

/* Runs after all exit handlers of the program. */
__attribute__((destructor)) static void destructor(void) {
    if (how == NULL) return;
    if (is(how, "destructors")) free_and_destroy();
    if (is(how, "destroyed")) {
        uint64_t at;
        printf("%d %d\n", cuMemAlloc_v2(&at, 4096), cuMemFree_v2(kept));
    }
}

static void on_quick_exit(void) { work(); }

static void *last_worker(void *first) {
    EXPECT(pthread_join(*(pthread_t *)first, NULL) == 0);
    CHECK(cuCtxSetCurrent(context));
    for (int i = 0; i < 20; i++) work();
    puts("worked");
    exit(0);
}

static void *exiting(void *unused) {
    (void)unused;
    exit(21);
}

/* Sets the key again each time, so that the library's destructors run both before and after this
   destructor. */
static void at_thread_end(void *rounds) {
    work();
    launch();
    if ((intptr_t)rounds > 1) pthread_setspecific(key, (void *)((intptr_t)rounds - 1));
}

static void *keyed(void *unused) {
    CHECK(cuCtxSetCurrent(context));
    EXPECT(pthread_setspecific(key, (void *)3) == 0);
    return unused;
}

/* The thread submits its first work in the destructor of the key, that is, while the thread ends. */
static void *keyed_only(void *unused) {
    EXPECT(pthread_setspecific(key, (void *)1) == 0);
    CHECK(cuCtxSetCurrent(context));
    return unused;
}

int main(int count, char **words) {
    EXPECT(count == 2);
    how = words[1];
    pthread_t thread;
    /* Handlers run in reverse order. A handler that is registered before CUDA is initialised runs after all handlers
       that the initialisation registers. */
    if (is(how, "early-handler")) EXPECT(atexit(free_and_destroy) == 0);
    begin();
    load_kernel();
    CHECK(cuMemAlloc_v2(&kept, 1 << 20));
    work();
    if (is(how, "late-handler")) EXPECT(atexit(free_and_destroy) == 0);
    if (is(how, "destroyed")) CHECK(cuCtxDestroy_v2(context));
    if (is(how, "main-thread")) {
        static pthread_t first;
        first = pthread_self();
        EXPECT(pthread_create(&thread, NULL, last_worker, &first) == 0);
        pthread_exit(NULL);
    }
    if (is(how, "keys")) {
        EXPECT(pthread_key_create(&key, at_thread_end) == 0);
        for (int i = 0; i < 60; i++) {
            EXPECT(pthread_create(&thread, NULL, i % 2 ? keyed : keyed_only, NULL) == 0 && pthread_join(thread, NULL) == 0);
        }
        puts("worked");
    }
    if (is(how, "thread-exits")) {
        EXPECT(pthread_create(&thread, NULL, exiting, NULL) == 0);
        pause();
    }
    if (is(how, "exit")) exit(18);
    if (is(how, "quick_exit")) {
        EXPECT(at_quick_exit(on_quick_exit) == 0);
        quick_exit(19);
    }
    if (is(how, "_exit")) _exit(20);
    if (is(how, "abort")) abort();
    if (is(how, "segv")) raise(SIGSEGV);
    if (is(how, "term")) kill(getpid(), SIGTERM), pause();
    if (is(how, "kill")) kill(getpid(), SIGKILL), pause();
    return is(how, "return") ? 17 : 0;
}
