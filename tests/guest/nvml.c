/* Queries NVML, in a program that is linked to NVML, and in a program that looks NVML up. */
#include "guest.h"

struct memory { uint64_t total, free, used; };
struct memory2 { unsigned version; uint64_t total, reserved, free, used; };

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device);
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory);
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory2 *memory);

static int (*first)(void *, struct memory *) = nvmlDeviceGetMemoryInfo;
static int (*second)(void *, struct memory2 *) = nvmlDeviceGetMemoryInfo_v2;

static void look_up(void *handle) {
    first = (int (*)(void *, struct memory *))dlsym(handle, "nvmlDeviceGetMemoryInfo");
    second = (int (*)(void *, struct memory2 *))dlsym(handle, "nvmlDeviceGetMemoryInfo_v2");
    EXPECT(first != NULL && second != NULL && dlerror() == NULL);
}

static void ask(void *device) {
    struct memory memory = {1, 2, 3};
    int code = first(device, &memory);
    printf("%d: %llu %d\n", code, (unsigned long long)memory.total, memory.free + memory.used == memory.total);
    for (unsigned version = 0; version < 4; version++) {
        struct memory2 other = {sizeof other | version << 24, 1, 2, 3, 4};
        code = second(device, &other);
        printf("%d: %llu %llu %x\n", code, (unsigned long long)other.total, (unsigned long long)other.reserved, other.version);
    }
    printf("nowhere: %d %d\n", first(device, NULL), second(device, NULL));
}

static void ask_all(void) {
    void *device = NULL;
    CHECK(nvmlDeviceGetHandleByIndex_v2(0, &device));
    ask(device);
    ask(NULL);
    ask((void *)4711);
    ask((void *)(uintptr_t)-1);
}

int main(int count, char **words) {
    EXPECT(count == 2);
    const char *what = words[1];
    CHECK(nvmlInit_v2());
    if (is(what, "looked-up")) look_up(dlopen("libnvidia-ml.so.1", RTLD_NOW));
    if (is(what, "default")) look_up(RTLD_DEFAULT);
    if (is(what, "next")) look_up(RTLD_NEXT);
    ask_all();
    begin();
    ask_all();
    load_kernel();
    launch();
    work();
    ask_all();
    CHECK(nvmlShutdown());
    ask_all();
    return 0;
}
