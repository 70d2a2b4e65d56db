/* One process of a job: rank FIND INIT RANK RANKS FILE MIB ROUNDS.
 *
 * FIND: how NCCL's functions are found: link, default (dlsym of RTLD_DEFAULT) or open (dlopen, then dlsym).
 * INIT: the function that creates the communicator: plain, config or scalable, or none: without NCCL's
 * functions of that name, as NCCL that is linked statically.
 * FILE: where rank 0 writes the unique id for the others. Each round works on MIB of memory of GPU RANK,
 * and then waits on the GPU for the other ranks. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nccl.h"

#define CHECK(call) \
    do { \
        int result = (call); \
        if (result) { \
            fprintf(stderr, "%s: %d\n", #call, result); \
            exit(1); \
        } \
    } while (0)

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(unsigned long long *at, size_t size);
int cuMemsetD32Async(unsigned long long at, unsigned value, size_t count, void *stream);
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamSynchronize(void *stream);

static void *library;

static void *find(const char *how, const char *name) {
    void *found = dlsym(strcmp(how, "open") ? RTLD_DEFAULT : library, name);
    if (!found)
        fprintf(stderr, "%s: %s\n", name, dlerror()), exit(1);
    return found;
}

/* NCCL's function: bound by the linker, or looked up. */
#ifdef LINKED
#define NCCL(name) (strcmp(how, "link") ? (__typeof__(&name))find(how, #name) : &name)
#else
#define NCCL(name) ((__typeof__(&name))find(how, #name))
#endif

int main(int count, char **arguments) {
    if (count != 8)
        return 2;
    const char *how = arguments[1], *init = arguments[2], *file = arguments[5];
    int rank = atoi(arguments[3]), ranks = atoi(arguments[4]), rounds = atoi(arguments[7]);
    size_t size = (size_t)atoi(arguments[6]) << 20;
    void *context, *stream;
    unsigned long long at;
    CHECK(cuInit(0));
    if (!strcmp(how, "open") && !(library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)))
        return fprintf(stderr, "%s\n", dlerror()), 1;
    CHECK(cuDevicePrimaryCtxRetain(&context, rank));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemAlloc_v2(&at, size));
    CHECK(cuStreamCreate(&stream, 1));

    ncclUniqueId ids[2];
    char temporary[4096];
    snprintf(temporary, sizeof temporary, "%s.new", file);
    if (rank == 0) {
        CHECK(NCCL(ncclGetUniqueId)(&ids[0]));
        FILE *out = fopen(temporary, "w");
        fwrite(&ids[0], sizeof ids[0], 1, out);
        fclose(out);
        rename(temporary, file);
    } else {
        FILE *in;
        while (!(in = fopen(file, "r")))
            usleep(1000);
        if (fread(&ids[0], sizeof ids[0], 1, in) != 1)
            return 1;
        fclose(in);
    }
    ids[1] = ids[0];
    struct ncclComm *comm = NULL;
    errno = 77;
    if (!strcmp(init, "plain"))
        CHECK(NCCL(ncclCommInitRank)(&comm, ranks, ids[0], rank));
    else if (!strcmp(init, "config"))
        CHECK(NCCL(ncclCommInitRankConfig)(&comm, ranks, ids[0], rank, &at));
    else if (!strcmp(init, "scalable"))
        CHECK(NCCL(ncclCommInitRankScalable)(&comm, ranks, rank, 2, ids, &at));
    else
        CHECK(NCCL(ncclMeet)(&comm, ranks, &ids[0], rank));
    if (errno != 78)
        return fprintf(stderr, "errno has changed to %d\n", errno), 1;

    for (int round = 1; round <= rounds; round++) {
        CHECK(cuMemsetD32Async(at, 1000 * rank + round, size / 4, stream));
        CHECK(NCCL(ncclBarrier)(comm, stream));
        CHECK(cuStreamSynchronize(stream));
        unsigned last;
        CHECK(cuMemcpyDtoH_v2(&last, at + size - 4, 4));
        if (last != (unsigned)(1000 * rank + round))
            return fprintf(stderr, "round %d: %u\n", round, last), 1;
    }
    CHECK(NCCL(ncclCommDestroy)(comm));
    puts("done");
    return 0;
}
