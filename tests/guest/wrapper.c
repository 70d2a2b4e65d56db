/* A library that replaces NVML on a host without NVML, and calls its own function by the exported name. */
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 7;
    return 0;
}

int counted(void) {
    unsigned count = 0;
    int code = nvmlDeviceGetCount_v2(&count);
    return code * 100 + (int)count;
}
