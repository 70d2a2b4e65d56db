/* Opens libnvshare.so with dlopen, and closes it. With `running`, the program initialises CUDA
   through the library before closing it. With `idle`, it doesn't. */
#include "guest.h"

int main(int count, char **words) {
    EXPECT(count == 3);
    for (int i = 0; i < 20; i++) {
        void *library = dlopen(words[2], RTLD_NOW | RTLD_LOCAL);
        if (library == NULL) FAIL("%s", dlerror());
        if (is(words[1], "running")) {
            int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
            EXPECT(init != NULL);
            CHECK(init(0));
        }
        EXPECT(dlclose(library) == 0);
    }
    begin();
    work();
    milliseconds(300);
    puts("worked");
    return 0;
}
