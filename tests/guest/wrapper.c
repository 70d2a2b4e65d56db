/* A library that stands in for NVML where that is not installed, and calls itself by its exported name. */
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 7;
    return 0;
}

int counted(void) {
    unsigned count = 0;
    int code = nvmlDeviceGetCount_v2(&count);
    return code * 100 + (int)count;
}
