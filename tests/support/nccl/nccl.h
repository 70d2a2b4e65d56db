typedef struct { char internal[128]; } ncclUniqueId;
struct ncclComm;

int ncclGetVersion(int *version);
int ncclGetUniqueId(ncclUniqueId *id);
int ncclMeet(struct ncclComm **comm, int ranks, const ncclUniqueId *id, int rank);
int ncclCommInitRank(struct ncclComm **comm, int ranks, ncclUniqueId id, int rank);
int ncclCommInitRankConfig(struct ncclComm **comm, int ranks, ncclUniqueId id, int rank, void *config);
int ncclCommInitRankScalable(struct ncclComm **comm, int ranks, int rank, int count, ncclUniqueId *ids, void *config);
int ncclCommVersion(struct ncclComm *comm);
int ncclCommDestroy(struct ncclComm *comm);
int ncclBarrier(struct ncclComm *comm, void *stream);
