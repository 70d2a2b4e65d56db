/* A program on a host without NVML. One of its libraries defines functions with NVML's names. */
#include "guest.h"

int main(int count, char **words) {
    EXPECT(count == 2);
    void *library = dlopen(words[1], RTLD_NOW | RTLD_GLOBAL);
    EXPECT(library != NULL);
    int (*counted)(void) = (int (*)(void))dlsym(library, "counted");
    int (*direct)(unsigned *) = (int (*)(unsigned *))dlsym(library, "nvmlDeviceGetCount_v2");
    EXPECT(counted != NULL && direct != NULL);
    unsigned number = 0;
    int code = direct(&number);
    printf("%d, %d %u\n", counted(), code, number);
    return 0;
}
