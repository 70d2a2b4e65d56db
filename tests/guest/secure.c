/* Prints whether it runs with more privileges than its user, and works. */
#include "guest.h"
#include <sys/auxv.h>

int main(void) {
    printf("%ssecure, ", getauxval(AT_SECURE) ? "" : "not ");
    int code = cuInit(0);
    /* An ordinary user may not have access to the simulated GPU. */
    if (code == 0 && getauxval(AT_SECURE)) {
        begin();
        work();
    }
    milliseconds(300);
    puts("worked");
    return 0;
}
