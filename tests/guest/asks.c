/* Looks up a function in each way that works without the driver. */
#include "guest.h"

int main(void) {
    void *found[] = {dlsym(RTLD_DEFAULT, "strlen"), dlsym(RTLD_NEXT, "strlen"), dlsym(RTLD_DEFAULT, "cuNoSuchCall"),
                     dlsym(RTLD_DEFAULT, "cuInit"), dlsym(RTLD_NEXT, "nvmlInit_v2")};
    for (size_t i = 0; i < sizeof found / sizeof *found; i++) puts(found[i] != NULL ? "found" : "nothing");
    return 0;
}
