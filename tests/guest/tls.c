/* The worker, in a program each thread of which has that much storage of its own. */
#include "worker.c"

__thread char large[TLS];
