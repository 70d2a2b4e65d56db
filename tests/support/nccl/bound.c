/* A library that is linked to NCCL. */

#include "nccl.h"

int bound_init(struct ncclComm **comm, int ranks, ncclUniqueId id, int rank) {
    return ncclCommInitRank(comm, ranks, id, rank);
}
