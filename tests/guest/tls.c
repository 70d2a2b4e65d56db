/* The worker, in a program whose threads each have this much thread-local storage. */
#include "worker.c"

__thread char large[TLS];
