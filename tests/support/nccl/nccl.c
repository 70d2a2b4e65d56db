/* A stand-in for NCCL. The processes of a communicator meet in a file whose name is the unique id. A
 * collective writes the flag of its own rank, and waits on the GPU for the flags of the others. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nccl.h"

enum { FLAGS = 1024 };

struct ncclComm {
    int ranks, rank, version;
    unsigned round;
    /* One flag for each rank: the number of collectives that it has reached. Then the number of ranks
     * that have arrived. */
    unsigned *shared;
    unsigned long long on_gpu;
};

int cuMemHostRegister_v2(void *at, size_t size, unsigned flags);
int cuMemHostGetDevicePointer_v2(unsigned long long *device, void *host, unsigned flags);
int cuStreamWriteValue32_v2(void *stream, unsigned long long at, unsigned value, unsigned flags);
int cuStreamWaitValue32_v2(void *stream, unsigned long long at, unsigned value, unsigned flags);

int ncclGetVersion(int *version) {
    *version = VERSION;
    return 0;
}

int ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, VERSION, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s/%d.%ld", getenv("NCCL_MEET"), getpid(), random());
    return 0;
}

/* Creates a communicator. Not a function of NCCL: nvshare does not know it. */
int ncclMeet(struct ncclComm **comm, int ranks, const ncclUniqueId *id, int rank) {
    /* nvshare preserves errno. */
    if (errno != 77)
        return 3;
    for (const char *byte = id->internal + strlen(id->internal) + 1; byte < id->internal + sizeof *id; byte++)
        if (*byte != VERSION)
            return 3;
    if (rank < 0 || rank >= ranks)
        return 4;
    struct ncclComm *new = calloc(1, sizeof *new);
    int file = open(id->internal, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, FLAGS * 4) < 0)
        return 2;
    new->shared = mmap(NULL, FLAGS * 4, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    new->ranks = ranks, new->rank = rank, new->version = VERSION;
    __atomic_add_fetch(&new->shared[ranks], 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&new->shared[ranks], __ATOMIC_SEQ_CST) < (unsigned)ranks)
        usleep(100);
    if (ranks > 1 && (cuMemHostRegister_v2(new->shared, FLAGS * 4, 2) || cuMemHostGetDevicePointer_v2(&new->on_gpu, new->shared, 0)))
        return 1;
    *comm = new;
    errno = 78;
    return 0;
}

int ncclCommInitRank(struct ncclComm **comm, int ranks, ncclUniqueId id, int rank) {
    return ncclMeet(comm, ranks, &id, rank);
}

int ncclCommInitRankConfig(struct ncclComm **comm, int ranks, ncclUniqueId id, int rank, void *config) {
    return config ? ncclMeet(comm, ranks, &id, rank) : 4;
}

int ncclCommInitRankScalable(struct ncclComm **comm, int ranks, int rank, int count, ncclUniqueId *ids, void *config) {
    return config && count == 2 ? ncclMeet(comm, ranks, &ids[0], rank) : 4;
}

int ncclCommVersion(struct ncclComm *comm) {
    return comm->version;
}

int ncclCommDestroy(struct ncclComm *comm) {
    free(comm);
    return 0;
}

int ncclBarrier(struct ncclComm *comm, void *stream) {
    unsigned round = ++comm->round;
    int result = cuStreamWriteValue32_v2(stream, comm->on_gpu + 4 * comm->rank, round, 0);
    for (int peer = 0; peer < comm->ranks && !result; peer++)
        result = cuStreamWaitValue32_v2(stream, comm->on_gpu + 4 * peer, round, 0);
    return result;
}
