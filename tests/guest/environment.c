/* Clears its environment except the simulated driver's variables, and then works. */
#include "guest.h"

extern char **environ;

int main(void) {
    char *kept[16], **to = kept;
    for (char **variable = environ; *variable != NULL; variable++)
        if (strncmp(*variable, "CUDA_SIM", 8) == 0 && to < kept + 15) *to++ = *variable;
    *to = NULL;
    environ = kept;
    begin();
    work();
    clearenv();
    work();
    EXPECT(environ == NULL || *environ == NULL);
    puts("worked");
    return 0;
}
