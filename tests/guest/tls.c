/* The worker, in a program whose threads each have TLS bytes of thread-local storage. */
#include "worker.c"

__thread char large[TLS];
