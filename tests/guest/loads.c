/* Loads a plugin that uses CUDA. The plugin is bound to its own dependencies first, or is in a separate namespace, or is
   unloaded later. */
#include "guest.h"

int main(int count, char **words) {
    EXPECT(count == 3);
    const char *how = words[1];
    void *plugin = NULL;
    if (is(how, "namespace-beside")) {
        begin();
        work();
    }
    if (strncmp(how, "deepbind", 8) == 0) plugin = dlopen(words[2], RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    else if (strncmp(how, "namespace", 9) == 0) plugin = dlmopen(LM_ID_NEWLM, words[2], RTLD_NOW | RTLD_LOCAL);
    else plugin = dlopen(words[2], RTLD_NOW);
    if (plugin == NULL) FAIL("%s", dlerror());
    void (*use)(int) = (void (*)(int))dlsym(plugin, "use_cuda");
    void (*finish)(void) = (void (*)(void))dlsym(plugin, "finish");
    uint64_t (*allocate)(void) = (uint64_t (*)(void))dlsym(plugin, "allocate");
    EXPECT(use != NULL && finish != NULL && allocate != NULL);
    use(5);
    if (is(how, "namespace")) {
        /* Looks up the plugin's own driver by name. */
        int number = 0, (*get)(int *) = (int (*)(int *))dlsym(plugin, "cuDeviceGetCount");
        EXPECT(get != NULL && get(&number) == 0 && number == 1);
    }
    if (is(how, "deepbind-mixed")) {
        /* The program uses and frees memory that the plugin has allocated. */
        uint64_t at = allocate();
        CHECK(cuMemsetD32_v2(at, 3, 1 << 14));
        CHECK(cuMemFree_v2(at));
        work();
    }
    if (is(how, "namespace-beside")) work();
    finish();
    EXPECT(dlclose(plugin) == 0);
    for (int i = 0; is(how, "unload-many") && i < 50; i++) {
        plugin = dlopen(words[2], RTLD_LAZY);
        EXPECT(plugin != NULL);
        ((void (*)(int))dlsym(plugin, "use_cuda"))(1);
        ((void (*)(void))dlsym(plugin, "finish"))();
        EXPECT(dlclose(plugin) == 0);
    }
    milliseconds(50);
    puts("worked");
    return 0;
}
