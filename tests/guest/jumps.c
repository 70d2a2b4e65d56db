/* Calls that a signal handler leaves by a jump, either during the wait for the GPU (`gate`) or in the middle of a copy
   (`copy`). Afterwards the program idles, or continues its work. */
#include "guest.h"
#include <setjmp.h>
#include <sys/time.h>

static sigjmp_buf back;

static void handler(int signal) {
    (void)signal;
    siglongjmp(back, 1);
}

static void after(unsigned ms) {
    struct itimerval timer = {{0, 0}, {ms / 1000, ms % 1000 * 1000}};
    struct sigaction action = {.sa_handler = handler};
    EXPECT(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

/* Keeps the GPU busy for this time. */
static void spin(uint64_t ns) {
    static const char image[] = ".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry spin_ns(.param .u64 a)\n{\n  ret;\n}\n";
    void *module, *kernel, *params[] = {&ns};
    CHECK(cuModuleLoadData(&module, image));
    CHECK(cuModuleGetFunction(&kernel, module, "spin_ns"));
    CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
}

int main(int count, char **words) {
    EXPECT(count == 2);
    uint64_t at;
    uint32_t word;
    begin();
    if (is(words[1], "gate")) {
        if (sigsetjmp(back, 1) == 0) {
            /* The other program works for 0.2 s at a time, so some of these waits take longer than 0.1 s. */
            for (int attempt = 0; attempt < 200; attempt++) {
                after(100);
                work();
            }
            FAIL("nothing has jumped out of the wait");
        }
        say("left\n");
        milliseconds(8000);
        return 0;
    }
    load_kernel();
    CHECK(cuMemAlloc_v2(&at, 1 << 16));
    CHECK(cuMemsetD32_v2(at, 7, 1 << 14));
    spin(700 * 1000 * 1000ULL);
    if (sigsetjmp(back, 1) == 0) {
        after(200);
        CHECK(cuMemcpyDtoH_v2(&word, at, sizeof word));
        FAIL("nothing has jumped out of the copy");
    }
    CHECK(cuMemcpyDtoH_v2(&word, at, sizeof word));
    EXPECT(word == 7);
    say("went on\n");
    milliseconds(8000);
    return 0;
}
