/* Look-ups of every kind, and the loader's error messages. */
#include "guest.h"

static void *driver;

/* Prints the name that a symbol has in its library. */
static void show(const char *what, void *address) {
    Dl_info info;
    const char *name = address != NULL && dladdr(address, &info) && info.dli_sname ? info.dli_sname : "nothing";
    printf("%s: %s, error %s\n", what, name, dlerror());
}

static void look(void *handle, const char *name) { show(name, dlsym(handle, name)); }

int main(int count, char **words) {
    EXPECT(count == 2);
    const char *what = words[1];
    if (is(what, "errors")) {
        /* Looks the names up without the driver, and then with it. */
        look(RTLD_DEFAULT, "cuNoSuchCall");
        look(RTLD_DEFAULT, "cuda");
        look(RTLD_DEFAULT, "cu");
        look(RTLD_DEFAULT, "");
        look(RTLD_NEXT, "cuNoSuchCall");
        look(dlopen(NULL, RTLD_LAZY), "cuNoSuchCall");
        EXPECT(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) != NULL);
        look(RTLD_DEFAULT, "cuNoSuchCall");
        look(RTLD_NEXT, "cuNoSuchCall");
        return 0;
    }
    if (is(what, "absent")) {
        for (int i = 0; i < 2; i++) {
            look(RTLD_DEFAULT, "cuInit");
            look(RTLD_NEXT, "cuInit");
            look(dlopen(NULL, RTLD_LAZY), "cuLaunchKernel");
            show("cuInit by version", dlvsym(RTLD_DEFAULT, "cuInit", "GLIBC_2.2.5"));
        }
        return 0;
    }
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    EXPECT(driver != NULL && dlerror() == NULL);
    if (is(what, "versions")) {
        show("dlsym", dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
        show("memcpy", dlvsym(RTLD_DEFAULT, "memcpy", "GLIBC_2.14"));
        show("memcpy", dlvsym(RTLD_DEFAULT, "memcpy", "GLIBC_9.99"));
        show("realpath", dlvsym(RTLD_DEFAULT, "realpath", "GLIBC_2.3"));
        show("cuInit", dlvsym(driver, "cuInit", "NO_SUCH_VERSION"));
        /* dlvsym finds the real dlsym, which must work. */
        void *(*real)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(RTLD_DEFAULT, "dlsym", "GLIBC_2.2.5");
        if (real != NULL) show("cuInit", real(driver, "cuInit"));
    }
    if (is(what, "addresses")) {
        look(driver, "cuInit");
        look(driver, "cuLaunchKernel");
        look(driver, "cuMemAlloc_v2");
        look(driver, "cuDriverGetVersion");
        look(driver, "dlsym");
        look(RTLD_DEFAULT, "cuInit");
        look(RTLD_DEFAULT, "cuMemFree_v2");
        look(dlopen(NULL, RTLD_LAZY), "cuInit");
    }
    if (is(what, "next")) {
        look(RTLD_NEXT, "malloc");
        look(RTLD_NEXT, "cuInit");
        look(RTLD_NEXT, "cuNoSuchCall");
        look(RTLD_NEXT, "main");
        look(RTLD_DEFAULT, "strlen");
    }
    if (is(what, "errors-loaded")) {
        look(driver, "cuNoSuchCall"); /* the program's first look-up */
        look(driver, "cuInit");
        look(driver, "cuMemAlloc_v9");
        look(driver, "no_such_call");
        look(driver, "cuCtxCreate"); /* this driver lacks it */
    }
    if (is(what, "lacking")) {
        /* The driver is older than some of these functions. */
        for (const char **name = (const char *[]){ "cuGreenCtxCreate", "cuMemcpyBatchAsync", "cuInit", NULL }; *name; name++)
            printf("%s is %s\n", *name, dlsym(RTLD_DEFAULT, *name) != NULL ? "there" : "not there");
    }
    if (is(what, "errors-pending")) {
        /* The program never reads the error, and its next look-up succeeds. */
        dlsym(driver, "cuNoSuchCall");
        void *found = dlsym(driver, "cuInit");
        show("after a failure", found);
        dlsym(driver, "cuNoSuchCall");
        found = dlsym(driver, "strlen");
        show("after another", found);
    }
    return 0;
}
