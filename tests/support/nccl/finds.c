/* Checks how NCCL's functions are found. finds: there is no NCCL. finds LIBRARY LIBRARY: two NCCLs with
 * versions 2 and 3. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>

#include "nccl.h"

#define EXPECT(condition) \
    do { \
        if (!(condition)) \
            return fprintf(stderr, "not true: %s\n", #condition), 1; \
    } while (0)

#pragma weak ncclCommInitRank

int cuInit(unsigned flags);

int main(int count, char **arguments) {
    for (int initialised = 0; initialised < 2; initialised++) {
        EXPECT(!ncclCommInitRank);
        EXPECT(!dlsym(RTLD_DEFAULT, "ncclCommInitRank") && dlerror());
        EXPECT(!dlsym(RTLD_NEXT, "ncclCommInitRankConfig") && dlerror());
        EXPECT(!dlsym(dlopen(NULL, RTLD_NOW), "ncclCommInitRankScalable") && dlerror());
        EXPECT(initialised || !cuInit(0));
    }
    for (int i = 1; i < count; i++) {
        void *library = dlopen(arguments[i], RTLD_NOW | RTLD_LOCAL);
        EXPECT(library);
        /* A library that is bound to the NCCL that was opened with it. */
        int (*bound)(struct ncclComm **, int, ncclUniqueId, int) = dlsym(library, "bound_init");
        EXPECT(bound);
        struct ncclComm *comm = NULL;
        ncclUniqueId id;
        EXPECT(!((__typeof__(&ncclGetUniqueId))dlsym(library, "ncclGetUniqueId"))(&id));
        __typeof__(&ncclCommVersion) version = dlsym(library, "ncclCommVersion");
        __typeof__(&ncclCommInitRank) init = dlsym(library, "ncclCommInitRank");
        EXPECT(version && init);
        errno = 77;
        EXPECT(!init(&comm, 1, id, 0) && version(comm) == i + 1);
        errno = 77;
        EXPECT(init(&comm, 1, id, 1) == 4);
        EXPECT(!((__typeof__(&ncclGetUniqueId))dlsym(library, "ncclGetUniqueId"))(&id));
        errno = 77;
        EXPECT(!bound(&comm, 1, id, 0) && version(comm) == i + 1);
        EXPECT(!dlsym(RTLD_DEFAULT, "ncclCommInitRank"));
        Dl_info where;
        EXPECT(dladdr(init, &where) && dladdr(version, &where));
    }
    puts("done");
    return 0;
}
