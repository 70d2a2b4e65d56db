// What chunks of host memory made by cuMemCreate (CU_MEM_LOCATION_TYPE_HOST_NUMA) cost, beside host memory that is registered:
// making, mapping, copies, kernels that run on them, sharing, accounting and checkpoints. One JSON line a measurement.
//
//   nvcc -O2 -std=c++17 -arch=native -o host_chunks host_chunks.cu -lcuda && ./host_chunks [--gib 8] [PART...]
//
// Parts: attributes make map copy kernel exchange pointers graph texture limits share cpu checkpoint (default: all, in this order).
// Copies and kernels are repeated, and the best run is reported; making memory is reported each time.

#include <cuda.h>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

using std::string;
using std::vector;
typedef unsigned long long u64;

static const size_t MIB = 1 << 20, GIB = 1 << 30, CHUNK = 64 * MIB;
static size_t total = 8 * GIB;
static CUdevice device;
static CUcontext context;
static int node = -1;

static const char *name(CUresult r) {
    const char *s = nullptr;
    return cuGetErrorName(r, &s) == CUDA_SUCCESS && s ? s : "?";
}
#define MUST(call)                                                                             \
    do {                                                                                       \
        CUresult r_ = (call);                                                                  \
        if (r_ != CUDA_SUCCESS) {                                                              \
            printf("{\"error\":\"%s\",\"call\":\"%s\",\"line\":%d}\n", name(r_), #call, __LINE__); \
            fflush(stdout);                                                                    \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
static double timed(const std::function<void()> &f) {
    double t = now();
    f();
    return now() - t;
}
static double best(int runs, const std::function<void()> &f) {
    double b = 1e9;
    for (int i = 0; i < runs; i++) {
        double t = timed(f);
        if (t < b) b = t;
    }
    return b;
}
static void on_threads(int n, const std::function<void(int)> &f) {
    vector<std::thread> all;
    for (int i = 0; i < n; i++)
        all.emplace_back([&, i] {
            cuCtxSetCurrent(context);
            f(i);
        });
    for (auto &t : all) t.join();
}

static CUmemAllocationProp kind(bool host, bool shareable = false) {
    CUmemAllocationProp p = {};
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type = host ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = host ? node : device;
    if (shareable) p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return p;
}
static CUmemAccessDesc access_of(bool cpu) {
    CUmemAccessDesc a = {};
    a.location.type = cpu ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE;
    a.location.id = cpu ? node : device;
    a.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return a;
}
static CUmemGenericAllocationHandle create(bool host, bool shareable = false) {
    CUmemGenericAllocationHandle h;
    CUmemAllocationProp p = kind(host, shareable);
    MUST(cuMemCreate(&h, CHUNK, &p, 0));
    return h;
}
static CUdeviceptr reserve(size_t bytes) {
    CUdeviceptr p;
    MUST(cuMemAddressReserve(&p, bytes, CHUNK, 0, 0));
    return p;
}
static void map(CUdeviceptr at, CUmemGenericAllocationHandle h) {
    CUmemAccessDesc a = access_of(false);
    MUST(cuMemMap(at, CHUNK, 0, h, 0));
    MUST(cuMemSetAccess(at, CHUNK, &a, 1));
}

// A range of chunks that is mapped for the GPU.
struct Range {
    CUdeviceptr at;
    vector<CUmemGenericAllocationHandle> handles;
    bool host;
    Range(bool host, size_t bytes, int threads = 4) : at(reserve(bytes)), handles(bytes / CHUNK), host(host) {
        on_threads(threads, [&](int t) {
            for (size_t i = t; i < handles.size(); i += threads) handles[i] = create(host);
        });
        for (size_t i = 0; i < handles.size(); i++) map(at + i * CHUNK, handles[i]);
    }
    ~Range() {
        MUST(cuMemUnmap(at, handles.size() * CHUNK));
        for (auto h : handles) MUST(cuMemRelease(h));
        MUST(cuMemAddressFree(at, handles.size() * CHUNK));
    }
};

// Host memory as the library makes it today: mapped with huge pages, touched and registered.
struct Registered {
    char *at;
    size_t bytes;
    double touching, registering;
    Registered(size_t bytes, int threads = 8) : bytes(bytes) {
        at = (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        madvise(at, bytes, MADV_HUGEPAGE);
        touching = timed([&] {
            on_threads(threads, [&](int t) {
                for (size_t i = t * 2 * MIB; i < bytes; i += threads * 2 * MIB)
                    for (size_t j = 0; j < 2 * MIB; j += 4096) at[i + j] = 1;
            });
        });
        registering = timed([&] {
            on_threads(threads, [&](int t) {
                for (size_t i = t * CHUNK; i < bytes; i += threads * CHUNK)
                    MUST(cuMemHostRegister(at + i, CHUNK, CU_MEMHOSTREGISTER_PORTABLE));
            });
        });
    }
    ~Registered() {
        for (size_t i = 0; i < bytes; i += CHUNK) MUST(cuMemHostUnregister(at + i));
        munmap(at, bytes);
    }
};

static int attribute(CUdevice_attribute a) {
    int v = -1;
    cuDeviceGetAttribute(&v, a, device);
    return v;
}
static string line_of(const char *path, const char *key) {
    FILE *f = fopen(path, "r");
    if (!f) return "absent";
    char s[512];
    string found = "absent";
    while (fgets(s, sizeof s, f))
        if (!strncmp(s, key, strlen(key))) {
            s[strcspn(s, "\n")] = 0;
            found = s + strlen(key);
            found.erase(0, found.find_first_not_of(" \t"));
            break;
        }
    fclose(f);
    return found;
}

// Parts

static void attributes() {
    int version = 0;
    cuDriverGetVersion(&version);
    char gpu[128] = "";
    cuDeviceGetName(gpu, sizeof gpu, device);
    size_t fine = 0, good = 0;
    CUmemAllocationProp p = kind(true);
    CUresult r = cuMemGetAllocationGranularity(&fine, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    cuMemGetAllocationGranularity(&good, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    printf("{\"part\":\"attributes\",\"gpu\":\"%s\",\"driver-api\":%d,\"host-numa-vmm\":%d,\"host-numa-id\":%d,\"pageable\":%d,"
           "\"host-vmm\":%d,\"granularity\":%zu,\"recommended\":%zu,\"result\":\"%s\",\"node-cpus\":\"%s\"}\n",
           gpu, version, attribute((CUdevice_attribute)141), node, attribute(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS),
           attribute((CUdevice_attribute)145), fine, good, name(r), line_of("/sys/devices/system/node/node0/cpulist", "").c_str());
}

static void make() {
    size_t n = total / CHUNK;
    for (int repeat = 0; repeat < 2; repeat++)
        for (int threads : {1, 2, 4, 8, 16}) {
            vector<CUmemGenericAllocationHandle> h(n);
            double t = timed([&] {
                on_threads(threads, [&](int k) {
                    for (size_t i = k; i < n; i += threads) h[i] = create(true);
                });
            });
            double release = timed([&] {
                on_threads(threads, [&](int k) {
                    for (size_t i = k; i < n; i += threads) MUST(cuMemRelease(h[i]));
                });
            });
            printf("{\"part\":\"make\",\"what\":\"host chunks\",\"threads\":%d,\"GiB/s\":%.2f,\"release GiB/s\":%.2f}\n", threads,
                   total / t / GIB, total / release / GIB);
            fflush(stdout);
        }
    for (int threads : {1, 8}) {
        double release;
        auto *m = new Registered(total, threads);
        double touching = m->touching, registering = m->registering;
        release = timed([&] { delete m; });
        printf("{\"part\":\"make\",\"what\":\"mmap, touch, register\",\"threads\":%d,\"GiB/s\":%.2f,\"touch s\":%.3f,"
               "\"register s\":%.3f,\"release GiB/s\":%.2f}\n",
               threads, total / (touching + registering) / GIB, touching, registering, total / release / GIB);
        fflush(stdout);
    }
    double t = timed([&] {
        void *p;
        MUST(cuMemHostAlloc(&p, 2 * GIB, CU_MEMHOSTALLOC_PORTABLE));
        MUST(cuMemFreeHost(p));
    });
    printf("{\"part\":\"make\",\"what\":\"cuMemHostAlloc and free\",\"threads\":1,\"GiB/s\":%.2f}\n", 2 / t);
}

static void mapping() {
    size_t n = 64;
    CUdeviceptr at = reserve(n * CHUNK);
    for (bool host : {false, true}) {
        vector<CUmemGenericAllocationHandle> h(n), other(n);
        double t_create = timed([&] { for (auto &x : h) x = create(host); });
        for (auto &x : other) x = create(!host);
        CUmemAccessDesc a = access_of(false);
        double t_map = 1e9, t_access = 1e9, t_unmap = 1e9, t_exchange = 1e9;
        for (int k = 0; k < 3; k++) {
            t_map = std::min(t_map, timed([&] { for (size_t i = 0; i < n; i++) MUST(cuMemMap(at + i * CHUNK, CHUNK, 0, h[i], 0)); }));
            t_access = std::min(t_access, timed([&] { for (size_t i = 0; i < n; i++) MUST(cuMemSetAccess(at + i * CHUNK, CHUNK, &a, 1)); }));
            // From this kind to the other at the same address.
            t_exchange = std::min(t_exchange, timed([&] {
                for (size_t i = 0; i < n; i++) {
                    MUST(cuMemUnmap(at + i * CHUNK, CHUNK));
                    map(at + i * CHUNK, other[i]);
                }
            }));
            t_unmap = std::min(t_unmap, timed([&] { for (size_t i = 0; i < n; i++) MUST(cuMemUnmap(at + i * CHUNK, CHUNK)); }));
        }
        double release = timed([&] { for (auto x : h) MUST(cuMemRelease(x)); });
        for (auto x : other) MUST(cuMemRelease(x));
        printf("{\"part\":\"map\",\"what\":\"%s\",\"us each\":{\"create\":%.1f,\"map\":%.1f,\"set access\":%.1f,\"to the other kind\":%.1f,"
               "\"unmap of the other kind\":%.1f,\"release\":%.1f}}\n",
               host ? "host" : "device", t_create / n * 1e6, t_map / n * 1e6, t_access / n * 1e6, t_exchange / n * 1e6, t_unmap / n * 1e6,
               release / n * 1e6);
    }
    MUST(cuMemAddressFree(at, n * CHUNK));
}

static void copies() {
    size_t bytes = 4 * GIB;
    Range gpu(false, bytes), more(false, bytes), host(true, bytes), host2(true, bytes);
    Registered reg(bytes), reg2(bytes);
    CUstream s, s2;
    MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    MUST(cuStreamCreate(&s2, CU_STREAM_NON_BLOCKING));
    auto chunked = [&](CUdeviceptr to, CUdeviceptr from, CUstream stream) {
        for (size_t i = 0; i < bytes; i += CHUNK) MUST(cuMemcpyAsync(to + i, from + i, CHUNK, stream));
    };
    auto rate = [&](const char *what, CUdeviceptr h, CUdeviceptr h2) {
        double out = best(4, [&] { chunked(h, gpu.at, s); MUST(cuStreamSynchronize(s)); });
        double in = best(4, [&] { chunked(gpu.at, h, s); MUST(cuStreamSynchronize(s)); });
        double both = best(4, [&] {
            chunked(h, gpu.at, s);
            chunked(more.at, h2, s2);
            MUST(cuStreamSynchronize(s));
            MUST(cuStreamSynchronize(s2));
        });
        printf("{\"part\":\"copy\",\"what\":\"%s\",\"GiB/s\":{\"out\":%.1f,\"in\":%.1f,\"both, each way\":%.1f}}\n", what, bytes / out / GIB,
               bytes / in / GIB, bytes / both / GIB);
    };
    rate("host chunks", host.at, host2.at);
    rate("registered", (CUdeviceptr)reg.at, (CUdeviceptr)reg2.at);
    MUST(cuStreamDestroy(s));
    MUST(cuStreamDestroy(s2));
}

__global__ void add_to_all(uint4 *p, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint4 v = p[i];
        v.x++;
        p[i] = v;
    }
}
__global__ void read_all(const uint4 *p, size_t n, unsigned *out) {
    unsigned sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint4 v = p[i];
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345) *out = sum;
}
__global__ void write_all(uint4 *p, size_t n, unsigned value) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = make_uint4(value, value, value, value);
}
__global__ void read_anywhere(const unsigned *p, size_t n, unsigned *out, int each) {
    size_t x = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    unsigned sum = 0;
    for (int k = 0; k < each; k++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        sum += p[(x >> 20) % n];
    }
    if (sum == 0x12345) *out = sum;
}
__global__ void atomics(unsigned *p, size_t n, int each) {
    size_t x = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (int k = 0; k < each; k++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        atomicAdd(&p[(x >> 20) % n], 1u);
    }
}
__global__ void sum_of(const unsigned *p, size_t n, u64 *out) {
    u64 sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) sum += p[i];
    atomicAdd(out, sum);
}
static u64 sum(CUdeviceptr p, size_t bytes) {
    CUdeviceptr out;
    u64 v = 0;
    MUST(cuMemAlloc(&out, 8));
    MUST(cuMemsetD8(out, 0, 8));
    sum_of<<<1024, 256>>>((unsigned *)p, bytes / 4, (u64 *)out);
    MUST(cuMemcpyDtoH(&v, out, 8));
    MUST(cuMemFree(out));
    return v;
}

static void kernels() {
    size_t bytes = 2 * GIB;
    CUdeviceptr out;
    MUST(cuMemAlloc(&out, 4));
    Range gpu(false, bytes), host(true, bytes);
    for (Range *r : {&gpu, &host}) {
        uint4 *p = (uint4 *)r->at;
        size_t n = bytes / 16;
        auto sync = [] { MUST(cuCtxSynchronize()); };
        write_all<<<4096, 256>>>(p, n, 0);
        sync();
        double r_time = best(3, [&] { read_all<<<4096, 256>>>(p, n, (unsigned *)out); sync(); });
        double w_time = best(3, [&] { write_all<<<4096, 256>>>(p, n, 0); sync(); });
        double rw_time = best(3, [&] { add_to_all<<<4096, 256>>>(p, n); sync(); });
        write_all<<<4096, 256>>>(p, n, 0);
        sync();
        double random = best(3, [&] { read_anywhere<<<1024, 256>>>((unsigned *)p, bytes / 4, (unsigned *)out, 64); sync(); });
        double atomic = best(3, [&] { atomics<<<1024, 256>>>((unsigned *)p, bytes / 4, 16); sync(); });
        u64 want = 3ull * 1024 * 256 * 16, got = sum(r->at, bytes);
        printf("{\"part\":\"kernel\",\"what\":\"%s\",\"GiB/s\":{\"read\":%.1f,\"write\":%.1f,\"read and write, each\":%.1f},"
               "\"million/s\":{\"random reads\":%.1f,\"random atomics\":%.1f},\"atomics right\":%s}\n",
               r->host ? "host chunks" : "device", bytes / r_time / GIB, bytes / w_time / GIB, bytes / rw_time / GIB,
               1024 * 256 * 64 / random / 1e6, 1024 * 256 * 16 / atomic / 1e6, want == got ? "true" : "false");
        fflush(stdout);
    }
    MUST(cuMemFree(out));
}

// A program's memory leaves and comes back. Today: copy to registered memory, unmap, release; create, map, copy back. With host chunks the
// address stays mapped: copy through a second mapping of the chunk that comes, then exchange the mappings.
static void exchange() {
    size_t n = total / CHUNK;
    CUdeviceptr at = reserve(total), aside = reserve(total);
    vector<CUmemGenericAllocationHandle> dev(n), hst(n);
    Registered reg(total);
    for (auto &h : hst) h = create(true);
    for (size_t i = 0; i < n; i++) map(at + i * CHUNK, dev[i] = create(false));
    write_all<<<4096, 256>>>((uint4 *)at, total / 16, 3);
    MUST(cuCtxSynchronize());
    u64 want = sum(at, total);
    CUstream s;
    MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    const size_t AHEAD = 4;
    vector<CUevent> done(n);
    for (auto &e : done) MUST(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
    // Copies each chunk, and finishes it while the next ones are copied.
    auto pipeline = [&](const std::function<void(size_t)> &begin, const std::function<void(size_t)> &finish) {
        for (size_t i = 0; i < n + AHEAD; i++) {
            if (i < n) {
                begin(i);
                MUST(cuEventRecord(done[i], s));
            }
            if (i >= AHEAD) {
                MUST(cuEventSynchronize(done[i - AHEAD]));
                finish(i - AHEAD);
            }
        }
    };
    auto A = [&](size_t i) { return at + i * CHUNK; };
    auto B = [&](size_t i) { return aside + i * CHUNK; };
    auto H = [&](size_t i) { return (CUdeviceptr)(reg.at + i * CHUNK); };
    for (int k = 0; k < 3; k++) {
        double out = timed([&] {
            pipeline([&](size_t i) { MUST(cuMemcpyAsync(H(i), A(i), CHUNK, s)); },
                     [&](size_t i) { MUST(cuMemUnmap(A(i), CHUNK)); MUST(cuMemRelease(dev[i])); });
        });
        double in = timed([&] {
            pipeline([&](size_t i) { map(A(i), dev[i] = create(false)); MUST(cuMemcpyAsync(A(i), H(i), CHUNK, s)); }, [](size_t) {});
        });
        printf("{\"part\":\"exchange\",\"what\":\"registered, unmapped\",\"GiB/s\":{\"out\":%.1f,\"in\":%.1f},\"right\":%s}\n",
               total / out / GIB, total / in / GIB, sum(at, total) == want ? "true" : "false");
    }
    for (int k = 0; k < 3; k++) {
        double out = timed([&] {
            pipeline([&](size_t i) { map(B(i), hst[i]); MUST(cuMemcpyAsync(B(i), A(i), CHUNK, s)); },
                     [&](size_t i) {
                         MUST(cuMemUnmap(A(i), CHUNK));
                         map(A(i), hst[i]);
                         MUST(cuMemUnmap(B(i), CHUNK));
                         MUST(cuMemRelease(dev[i]));
                     });
        });
        bool right = sum(at, total) == want;
        double in = timed([&] {
            pipeline([&](size_t i) { map(B(i), dev[i] = create(false)); MUST(cuMemcpyAsync(B(i), A(i), CHUNK, s)); },
                     [&](size_t i) {
                         MUST(cuMemUnmap(A(i), CHUNK));
                         map(A(i), dev[i]);
                         MUST(cuMemUnmap(B(i), CHUNK));
                     });
        });
        printf("{\"part\":\"exchange\",\"what\":\"host chunks, mapped\",\"GiB/s\":{\"out\":%.1f,\"in\":%.1f},\"right\":%s}\n",
               total / out / GIB, total / in / GIB, right && sum(at, total) == want ? "true" : "false");
    }
    // The host copies stay mapped aside for ever, so that an exchange maps once.
    for (size_t i = 0; i < n; i++) map(B(i), hst[i]);
    for (int k = 0; k < 3; k++) {
        double out = timed([&] {
            pipeline([&](size_t i) { MUST(cuMemcpyAsync(B(i), A(i), CHUNK, s)); },
                     [&](size_t i) {
                         MUST(cuMemUnmap(A(i), CHUNK));
                         map(A(i), hst[i]);
                         MUST(cuMemRelease(dev[i]));
                     });
        });
        bool right = sum(at, total) == want;
        // The device's chunk is written by a copy through the final address, which nobody reads while the gate is closed.
        double in = timed([&] {
            pipeline([&](size_t i) {
                         dev[i] = create(false);
                         MUST(cuMemUnmap(A(i), CHUNK));
                         map(A(i), dev[i]);
                         MUST(cuMemcpyAsync(A(i), B(i), CHUNK, s));
                     },
                     [](size_t) {});
        });
        printf("{\"part\":\"exchange\",\"what\":\"host chunks, mapped twice\",\"GiB/s\":{\"out\":%.1f,\"in\":%.1f},\"right\":%s}\n",
               total / out / GIB, total / in / GIB, right && sum(at, total) == want ? "true" : "false");
    }
    for (size_t i = 0; i < n; i++) MUST(cuMemUnmap(B(i), CHUNK));
    MUST(cuMemUnmap(at, total));
    for (auto h : hst) MUST(cuMemRelease(h));
    for (auto h : dev) MUST(cuMemRelease(h));
    for (auto e : done) MUST(cuEventDestroy(e));
    MUST(cuStreamDestroy(s));
    MUST(cuMemAddressFree(at, total));
    MUST(cuMemAddressFree(aside, total));
}

static void pointers() {
    Range host(true, CHUNK);
    unsigned type = 0, managed = 9;
    int ordinal = -9;
    CUdeviceptr p = 0;
    void *hp = nullptr;
    CUcontext c = nullptr;
    CUresult r[6];
    r[0] = cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, host.at);
    r[1] = cuPointerGetAttribute(&p, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, host.at);
    r[2] = cuPointerGetAttribute(&hp, CU_POINTER_ATTRIBUTE_HOST_POINTER, host.at);
    r[3] = cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, host.at);
    r[4] = cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, host.at);
    r[5] = cuPointerGetAttribute(&c, CU_POINTER_ATTRIBUTE_CONTEXT, host.at);
    printf("{\"part\":\"pointers\",\"memory-type\":[%u,\"%s\"],\"device-pointer\":[%d,\"%s\"],\"host-pointer\":[\"%p\",\"%s\"],"
           "\"ordinal\":[%d,\"%s\"],\"managed\":[%u,\"%s\"],\"context\":[%d,\"%s\"]}\n",
           type, name(r[0]), p == host.at, name(r[1]), hp, name(r[2]), ordinal, name(r[3]), managed, name(r[4]), c != nullptr, name(r[5]));
}

static void graphs() {
    Range gpu(false, CHUNK), host(true, CHUNK);
    CUstream s;
    CUgraph g;
    CUgraphExec e;
    MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    MUST(cuMemsetD32Async(host.at, 7, CHUNK / 4, s));
    add_to_all<<<1024, 256, 0, s>>>((uint4 *)host.at, CHUNK / 16);
    MUST(cuMemcpyAsync(gpu.at, host.at, CHUNK, s));
    MUST(cuMemcpyDtoDAsync(host.at, gpu.at, CHUNK, s));
    MUST(cuStreamEndCapture(s, &g));
    CUresult made = cuGraphInstantiate(&e, g, 0);
    CUresult ran = made == CUDA_SUCCESS ? cuGraphLaunch(e, s) : made;
    CUresult ended = cuStreamSynchronize(s);
    u64 want = (u64)(CHUNK / 4) * 7 + CHUNK / 16;
    // The graph is made while the address is on the device and launched when it is on the host, and the other way round.
    CUmemGenericAllocationHandle h = create(true);
    MUST(cuMemcpyDtoD(host.at, gpu.at, CHUNK));
    MUST(cuMemUnmap(gpu.at, CHUNK));
    map(gpu.at, h);
    CUresult moved = cuGraphLaunch(e, s);
    CUresult moved_end = cuStreamSynchronize(s);
    bool right = sum(gpu.at, CHUNK) == want && sum(host.at, CHUNK) == want;
    printf("{\"part\":\"graph\",\"instantiate\":\"%s\",\"launch\":\"%s\",\"end\":\"%s\",\"launch after an exchange\":\"%s\","
           "\"end after an exchange\":\"%s\",\"right\":%s}\n",
           name(made), name(ran), name(ended), name(moved), name(moved_end), right ? "true" : "false");
    MUST(cuMemRelease(h));
    cuGraphExecDestroy(e);
    cuGraphDestroy(g);
    cuStreamDestroy(s);
}

__global__ void fetch(CUtexObject t, unsigned *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex1Dfetch<unsigned>(t, i);
}
static void textures() {
    // Made while the address is on the device, used when it is on the host.
    Range range(false, CHUNK), out(false, CHUNK);
    MUST(cuMemsetD32(range.at, 5, CHUNK / 4));
    CUDA_RESOURCE_DESC d = {};
    d.resType = CU_RESOURCE_TYPE_LINEAR;
    d.res.linear.devPtr = range.at;
    d.res.linear.format = CU_AD_FORMAT_UNSIGNED_INT32;
    d.res.linear.numChannels = 1;
    d.res.linear.sizeInBytes = CHUNK;
    CUDA_TEXTURE_DESC t = {};
    t.flags = CU_TRSF_READ_AS_INTEGER;
    CUtexObject on_device = 0, on_host = 0;
    CUresult first = cuTexObjectCreate(&on_device, &d, &t, nullptr);
    CUmemGenericAllocationHandle h = create(true);
    MUST(cuMemUnmap(range.at, CHUNK));
    map(range.at, h);
    MUST(cuMemsetD32(range.at, 6, CHUNK / 4));
    CUresult second = cuTexObjectCreate(&on_host, &d, &t, nullptr);
    int n = 1 << 20;
    u64 sums[2] = {};
    CUresult ends[2] = {first, second};
    CUtexObject both[2] = {on_device, on_host};
    for (int k = 0; k < 2; k++)
        if (both[k]) {
            fetch<<<n / 256, 256>>>(both[k], (unsigned *)out.at, n);
            ends[k] = cuCtxSynchronize();
            sums[k] = sum(out.at, n * 4);
        }
    printf("{\"part\":\"texture\",\"made on device\":\"%s\",\"made on host\":\"%s\",\"fetch\":[\"%s\",\"%s\"],\"right\":[%d,%d]}\n", name(first),
           name(second), name(ends[0]), name(ends[1]), sums[0] == 6ull * n, sums[1] == 6ull * n);
    MUST(cuMemRelease(h));
}

static void limits() {
    rlimit old, low = {65536, 65536};
    getrlimit(RLIMIT_MEMLOCK, &old);
    low.rlim_max = old.rlim_max;
    auto view = [&](const char *when) {
        string cg = line_of("/proc/self/cgroup", "0::");
        string current = line_of(("/sys/fs/cgroup" + cg + "/memory.current").c_str(), "");
        string v1 = line_of("/sys/fs/cgroup/memory/memory.usage_in_bytes", "");
        printf("{\"part\":\"limits\",\"when\":\"%s\",\"memory.current\":\"%s\",\"v1 usage\":\"%s\",\"VmRSS\":\"%s\",\"VmLck\":\"%s\",\"VmPin\":\"%s\","
               "\"MemAvailable\":\"%s\",\"MemFree\":\"%s\",\"Unevictable\":\"%s\",\"AnonPages\":\"%s\",\"Shmem\":\"%s\"}\n",
               when, current.c_str(), v1.c_str(), line_of("/proc/self/status", "VmRSS:").c_str(), line_of("/proc/self/status", "VmLck:").c_str(),
               line_of("/proc/self/status", "VmPin:").c_str(), line_of("/proc/meminfo", "MemAvailable:").c_str(),
               line_of("/proc/meminfo", "MemFree:").c_str(), line_of("/proc/meminfo", "Unevictable:").c_str(),
               line_of("/proc/meminfo", "AnonPages:").c_str(), line_of("/proc/meminfo", "Shmem:").c_str());
        fflush(stdout);
    };
    // Root may exceed RLIMIT_MEMLOCK, so that is tried as another user.
    view("before");
    {
        vector<CUmemGenericAllocationHandle> h(total / CHUNK);
        for (auto &x : h) x = create(true);
        view("host chunks");
        for (auto &x : h) MUST(cuMemRelease(x));
    }
    view("released");
    {
        Registered reg(total);
        view("registered");
    }
    setrlimit(RLIMIT_MEMLOCK, &low);
    CUmemAllocationProp p = kind(true);
    CUmemGenericAllocationHandle h = 0;
    uid_t was = geteuid();
    if (was == 0 && seteuid(65534) != 0) perror("seteuid");
    CUresult r = cuMemCreate(&h, CHUNK, &p, 0);
    char *m = (char *)mmap(nullptr, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(m, 1, CHUNK);
    CUresult q = cuMemHostRegister(m, CHUNK, 0);
    if (was == 0 && seteuid(0) != 0) perror("seteuid");
    printf("{\"part\":\"limits\",\"when\":\"RLIMIT_MEMLOCK 64 KiB, not root\",\"host chunk\":\"%s\",\"register\":\"%s\"}\n", name(r), name(q));
    if (r == CUDA_SUCCESS) MUST(cuMemRelease(h));
    setrlimit(RLIMIT_MEMLOCK, &old);
}

static char *self;
static pid_t start(vector<string> words) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        vector<char *> v = {self};
        for (auto &w : words) v.push_back((char *)w.c_str());
        v.push_back(nullptr);
        execv("/proc/self/exe", v.data());
        _exit(127);
    }
    return pid;
}

static void share() {
    for (bool host : {false, true}) {
        CUmemGenericAllocationHandle h = create(host, true);
        CUdeviceptr at = reserve(CHUNK);
        map(at, h);
        MUST(cuMemsetD32(at, 9, CHUNK / 4));
        MUST(cuCtxSynchronize());
        int fd = -1;
        CUresult r = cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        printf("{\"part\":\"share\",\"what\":\"%s\",\"export\":\"%s\"}\n", host ? "host chunk" : "device chunk", name(r));
        if (r == CUDA_SUCCESS) {
            int status = 0;
            waitpid(start({"--import", std::to_string(fd)}), &status, 0);
            bool right = sum(at, CHUNK) == (u64)(CHUNK / 4) * 9 + CHUNK / 16;
            printf("{\"part\":\"share\",\"seen by the exporter\":%s,\"child\":%d}\n", right ? "true" : "false", WEXITSTATUS(status));
            close(fd);
        }
        MUST(cuMemUnmap(at, CHUNK));
        MUST(cuMemRelease(h));
    }
}
static int import(int fd) {
    CUmemGenericAllocationHandle h;
    CUresult r = cuMemImportFromShareableHandle(&h, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (r != CUDA_SUCCESS) {
        printf("{\"part\":\"share\",\"import\":\"%s\"}\n", name(r));
        return 1;
    }
    CUdeviceptr at = reserve(CHUNK);
    map(at, h);
    bool right = sum(at, CHUNK) == (u64)(CHUNK / 4) * 9;
    add_to_all<<<1024, 256>>>((uint4 *)at, CHUNK / 16);
    MUST(cuCtxSynchronize());
    printf("{\"part\":\"share\",\"import\":\"%s\",\"right\":%s}\n", name(r), right ? "true" : "false");
    fflush(stdout);
    return 0;
}

static void cpu() {
    size_t bytes = GIB;
    CUdeviceptr at = reserve(bytes);
    vector<CUmemGenericAllocationHandle> h(bytes / CHUNK);
    CUmemAccessDesc both[2] = {access_of(false), access_of(true)};
    CUresult r = CUDA_SUCCESS;
    for (size_t i = 0; i < h.size(); i++) {
        MUST(cuMemMap(at + i * CHUNK, CHUNK, 0, h[i] = create(true), 0));
        CUresult x = cuMemSetAccess(at + i * CHUNK, CHUNK, both, 2);
        if (x != CUDA_SUCCESS) r = x;
    }
    printf("{\"part\":\"cpu\",\"access\":\"%s\"", name(r));
    if (r == CUDA_SUCCESS) {
        MUST(cuMemsetD32(at, 3, bytes / 4));
        MUST(cuCtxSynchronize());
        unsigned *p = (unsigned *)at;
        bool right = p[0] == 3 && p[bytes / 4 - 1] == 3;
        double write = best(3, [&] { memset(p, 0, bytes); });
        vector<char> there(bytes);
        double read = best(3, [&] { memcpy(there.data(), p, bytes); });
        int fd = open("host_chunks.tmp", O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
        ssize_t direct = fd < 0 ? -2 : pwrite(fd, p, 16 * MIB, 0);
        int e = direct < 0 ? errno : 0;
        if (fd >= 0) close(fd);
        unlink("host_chunks.tmp");
        int sv[2];
        socketpair(AF_UNIX, SOCK_STREAM, 0, sv);
        ssize_t sent = send(sv[0], p, 4096, 0);
        printf(",\"right\":%s,\"GiB/s\":{\"memset\":%.1f,\"memcpy\":%.1f},\"O_DIRECT write\":[%zd,\"%s\"],\"send\":%zd", right ? "true" : "false",
               bytes / write / GIB, bytes / read / GIB, direct, strerror(e), sent);
        printf(",\"smaps\":\"%s\"", line_of("/proc/self/smaps_rollup", "Rss:").c_str());
    }
    printf("}\n");
    MUST(cuMemUnmap(at, bytes));
    for (auto x : h) MUST(cuMemRelease(x));
}

// A process with host chunks is checkpointed and restored from outside.
static int sleeper(size_t bytes, bool host, int ready, int go) {
    Range r(host, bytes, 8);
    MUST(cuMemsetD32(r.at, 4, bytes / 4));
    MUST(cuCtxSynchronize());
    char c = 1;
    if (write(ready, &c, 1) != 1 || read(go, &c, 1) != 1) return 2;
    bool right = sum(r.at, bytes) == (u64)(bytes / 4) * 4;
    add_to_all<<<1024, 256>>>((uint4 *)r.at, bytes / 16);
    CUresult e = cuCtxSynchronize();
    printf("{\"part\":\"checkpoint\",\"what\":\"after\",\"right\":%s,\"kernel\":\"%s\"}\n", right ? "true" : "false", name(e));
    fflush(stdout);
    return right ? 0 : 1;
}
static void checkpoint() {
    for (bool host : {false, true})
        for (size_t bytes : {(size_t)(2 * GIB), (size_t)(host ? 40 * GIB : 10 * GIB)}) {
            int ready[2], go[2];
            if (pipe(ready) || pipe(go)) return;
            pid_t pid = start({"--sleeper", std::to_string(bytes), host ? "1" : "0", std::to_string(ready[1]), std::to_string(go[0])});
            close(ready[1]);
            char c;
            if (read(ready[0], &c, 1) != 1) {
                printf("{\"part\":\"checkpoint\",\"what\":\"no start\"}\n");
                return;
            }
            CUcheckpointLockArgs lock = {};
            lock.timeoutMs = 20000;
            CUcheckpointCheckpointArgs cp = {};
            CUcheckpointRestoreArgs re = {};
            CUcheckpointUnlockArgs un = {};
            CUresult r[4] = {CUDA_SUCCESS, CUDA_ERROR_UNKNOWN, CUDA_ERROR_UNKNOWN, CUDA_ERROR_UNKNOWN};
            double t[4] = {};
            t[0] = timed([&] { r[0] = cuCheckpointProcessLock(pid, &lock); });
            if (r[0] == CUDA_SUCCESS) t[1] = timed([&] { r[1] = cuCheckpointProcessCheckpoint(pid, &cp); });
            if (r[1] == CUDA_SUCCESS) t[2] = timed([&] { r[2] = cuCheckpointProcessRestore(pid, &re); });
            if (r[0] == CUDA_SUCCESS) t[3] = timed([&] { r[3] = cuCheckpointProcessUnlock(pid, &un); });
            printf("{\"part\":\"checkpoint\",\"what\":\"%s\",\"GiB\":%zu,\"lock\":[\"%s\",%.2f],\"checkpoint\":[\"%s\",%.2f],\"restore\":[\"%s\",%.2f],"
                   "\"unlock\":[\"%s\",%.2f]}\n",
                   host ? "host chunks" : "device chunks", bytes / GIB, name(r[0]), t[0], name(r[1]), t[1], name(r[2]), t[2], name(r[3]), t[3]);
            fflush(stdout);
            if (write(go[1], &c, 1) != 1) perror("write");
            int status = -1;
            for (int k = 0; k < 200 && waitpid(pid, &status, WNOHANG) == 0; k++) usleep(100000);
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            close(ready[0]);
            close(go[0]);
            close(go[1]);
        }
}

int main(int argc, char **argv) {
    self = argv[0];
    setvbuf(stdout, nullptr, _IOLBF, 0);
    MUST(cuInit(0));
    MUST(cuDeviceGet(&device, 0));
    MUST(cuDevicePrimaryCtxRetain(&context, device));
    MUST(cuCtxSetCurrent(context));
    node = attribute((CUdevice_attribute)134); // CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
    vector<string> parts;
    for (int i = 1; i < argc; i++) {
        string a = argv[i];
        if (a == "--gib") total = atoll(argv[++i]) * GIB;
        else if (a == "--import") return import(atoi(argv[i + 1]));
        else if (a == "--sleeper") return sleeper(atoll(argv[i + 1]), atoi(argv[i + 2]), atoi(argv[i + 3]), atoi(argv[i + 4]));
        else parts.push_back(a);
    }
    struct { const char *name; void (*run)(); } all[] = {
        {"attributes", attributes}, {"make", make}, {"map", mapping}, {"copy", copies}, {"kernel", kernels}, {"exchange", exchange},
        {"pointers", pointers}, {"graph", graphs}, {"texture", textures}, {"limits", limits}, {"share", share}, {"cpu", cpu},
        {"checkpoint", checkpoint}};
    for (auto &p : all) {
        bool wanted = parts.empty();
        for (auto &x : parts) wanted |= x == p.name;
        if (wanted) {
            p.run();
            fflush(stdout);
        }
    }
}
