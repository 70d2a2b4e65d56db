/* A library whose constructor ends when the file $UNTIL exists. */
#include "guest.h"

__attribute__((constructor)) static void construct(void) {
    say("constructing\n");
    for (const char *path = getenv("UNTIL"); path != NULL && access(path, F_OK) != 0;) milliseconds(5);
}
