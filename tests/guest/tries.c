/* Loads the driver like a program that can run without it. If that fails, prints the error and exits with its own
   status. */
#include "guest.h"

int main(int count, char **words) {
    EXPECT(count == 2);
    void *driver = dlopen(words[1], RTLD_NOW);
    if (driver == NULL) {
        printf("%s\n", dlerror());
        printf("%p\n", dlsym(RTLD_DEFAULT, "cuInit"));
        return 3;
    }
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*number)(int *) = (int (*)(int *))dlsym(driver, "cuDeviceGetCount");
    EXPECT(init != NULL && number != NULL);
    int code = 0;
    for (int i = 0; i < 3; i++) {
        int devices = -1;
        code = init(0);
        int second = number(&devices);
        printf("cuInit %d, cuDeviceGetCount %d: %d\n", code, second, devices);
    }
    milliseconds(100);
    return code == 0 ? 0 : 4;
}
