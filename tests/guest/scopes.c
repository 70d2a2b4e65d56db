/* Opens a plugin in a separate scope, before and after the driver is loaded. The plugin then looks up a function. */
#include "guest.h"

int main(int count, char **words) {
    EXPECT(count == 2);
    void *plugin = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    EXPECT(plugin != NULL);
    int (*helper)(void) = (int (*)(void))dlsym(plugin, "helper_of_plugin");
    EXPECT(helper != NULL);
    printf("%d\n", helper());
    EXPECT(dlopen("libcuda.so.1", RTLD_NOW) != NULL);
    printf("%d\n", helper());
    return 0;
}
