/* Waits for some time, so that a guest could change the state of the process, and then describes
   that state. */
#include "guest.h"

extern char **environ;

/* Prints a variable's name and a hash of its value. The value itself may be private. */
static void show(const char *variable) {
    unsigned hash = 0;
    for (const char *at = variable; *at != '\0'; at++) hash = hash * 31 + (unsigned char)*at;
    printf("%.*s %x\n", (int)strcspn(variable, "="), variable, hash);
}

int main(int count, char **words) {
    EXPECT(count == 2);
    if (is(words[1], "loaded")) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        EXPECT(library != NULL);
        int version = 0, (*get)(int *) = (int (*)(int *))dlsym(library, "cuDriverGetVersion");
        EXPECT(get != NULL && get(&version) == 0 && version > 0);
        EXPECT(dlsym(library, "cuInit") != NULL && dlsym(RTLD_DEFAULT, "cuLaunchKernel") != NULL);
    }
    milliseconds(1000);
    char line[4096];
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status) != NULL)
        /* Skips SigQ, which counts the signals of all processes of the user. */
        if (strncmp(line, "SigQ", 4) != 0 && (strncmp(line, "Sig", 3) == 0 || strncmp(line, "Shd", 3) == 0)) fputs(line, stdout);
    fclose(status);
    int threads = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) threads += task->d_name[0] != '.';
    closedir(tasks);
    printf("threads %d\n", threads);
    for (int fd = 0; fd < 64; fd++)
        if (fcntl(fd, F_GETFD) != -1) printf("descriptor %d\n", fd);
    for (int signal = 1; signal < 32; signal++) {
        struct sigaction action;
        sigaction(signal, NULL, &action);
        if (action.sa_handler != SIG_DFL) printf("signal %d is handled\n", signal);
    }
    for (char **variable = environ; *variable != NULL; variable++)
        if (strncmp(*variable, "NVSHARE_", 8) != 0 && strncmp(*variable, "LD_PRELOAD=", 11) != 0) show(*variable);
    return 0;
}
