/* A plugin that looks up with RTLD_DEFAULT a function that only its own scope has, with a name like the driver's. */
#include "guest.h"

int cuPluginHelper(void) { return 42; }

int helper_of_plugin(void) {
    int (*helper)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "cuPluginHelper");
    return helper != NULL ? helper() : -1;
}
