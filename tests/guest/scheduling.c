/* A thread with its own scheduling policy, processors, nice value and memory policy starts the library. The settings of the library's
   thread are compared with the first thread's settings. With `deadline`, the thread has a policy under which it cannot
   start threads. */
#include "guest.h"
#include <sched.h>
#include <sys/resource.h>

static cpu_set_t first;
/* Users other than root may not lower a nice value again, unless RLIMIT_NICE permits it. */
static int may_go_back;

static void *start(void *unused) {
    cpu_set_t one;
    struct sched_param none = {0};
    int cpu = 0;
    while (!CPU_ISSET(cpu, &first)) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    EXPECT(sched_setaffinity(0, sizeof one, &one) == 0);
    EXPECT(sched_setscheduler(0, SCHED_BATCH, &none) == 0);
    EXPECT(setpriority(PRIO_PROCESS, 0, 7) == 0);
    may_go_back = setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, getpid())) == 0;
    EXPECT(setpriority(PRIO_PROCESS, 0, 7) == 0);
    /* MPOL_BIND to node 0. A kernel without NUMA lacks the call. */
    unsigned long nodes = 1;
    EXPECT(syscall(SYS_set_mempolicy, 2, &nodes, 8 * sizeof nodes) == 0 || errno == ENOSYS);
    begin();
    work();
    return unused;
}

/* Whether the thread allocates its memory by the system's policy. The file shows a thread's policy for memory without one. */
static int has_default_policy(const char *task) {
    char path[300], line[1000], policy[100];
    snprintf(path, sizeof path, "/proc/self/task/%s/numa_maps", task);
    FILE *file = fopen(path, "r");
    if (file == NULL) return 1;
    while (fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "%*s %99s", policy) == 1 && !is(policy, "default")) return 0;
    fclose(file);
    return 1;
}

static void be_deadline(void) {
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; } policy =
        {.size = 48, .policy = 6, .runtime = 1000000, .deadline = 100000000, .period = 100000000};
    if (syscall(SYS_sched_setattr, 0, &policy, 0) != 0) {
        puts("the kernel refuses it");
        exit(0);
    }
}

int main(int count, char **words) {
    pthread_t thread;
    if (count > 1 && is(words[1], "deadline")) {
        be_deadline();
        begin();
        work();
        puts("worked");
        return 0;
    }
    EXPECT(sched_getaffinity(0, sizeof first, &first) == 0);
    EXPECT(pthread_create(&thread, NULL, start, NULL) == 0 && pthread_join(thread, NULL) == 0);
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char path[300], name[100] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (file == NULL || fscanf(file, "%99s", name) != 1 || !is(name, "nvshare")) continue;
        cpu_set_t cpus;
        int id = atoi(task->d_name);
        EXPECT(sched_getaffinity(id, sizeof cpus, &cpus) == 0);
        printf("policy %d, %s processors, %s nice value, %s memory policy\n", sched_getscheduler(id),
               CPU_EQUAL(&cpus, &first) ? "all" : "other",
               getpriority(PRIO_PROCESS, id) == (may_go_back ? getpriority(PRIO_PROCESS, getpid()) : 7) ? "the right" : "another",
               has_default_policy(task->d_name) ? "the default" : "another");
    }
    return 0;
}
