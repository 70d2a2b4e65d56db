/* Ends while two of its threads wait for the GPU. */
#include "guest.h"

static void *waiter(void *unused) {
    CHECK(cuCtxSetCurrent(context));
    work();
    say("not reached\n");
    return unused;
}

int main(int count, char **words) {
    EXPECT(count == 2);
    pthread_t thread;
    begin();
    for (int i = 0; i < 2; i++) EXPECT(pthread_create(&thread, NULL, waiter, NULL) == 0);
    milliseconds(300);
    say("waiting\n");
    if (is(words[1], "exit")) exit(18);
    if (is(words[1], "_exit")) _exit(20);
    abort();
}
