/* A plugin that looks up a function with RTLD_DEFAULT. The function is only in the plugin's own scope, and its name is
   like the names of the driver's functions. */
#include "guest.h"

int cuPluginHelper(void) { return 42; }

int helper_of_plugin(void) {
    int (*helper)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "cuPluginHelper");
    return helper != NULL ? helper() : -1;
}
