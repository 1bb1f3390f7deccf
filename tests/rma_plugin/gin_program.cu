// A small GIN program that is not moecomm: kernels put, signal, get and count through NCCL's device API, and check every byte.
//   gin_program <ranks>                    ranks are threads of this process, a GPU each
//   gin_program <ranks> <rank> <id file>   this process is one of them; rank 0 writes the file
// Ends with status 0 if everything was right.
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

constexpr size_t kChunk = 1 << 20;  // a rank's place in a window
constexpr int kRounds = 20;
constexpr long long kPatience = 20LL * 1000 * 1000 * 1000;  // ns that a kernel waits for a signal
enum Signal { kArrived, kChecked, kReady, kValue, kSignals };

#define NCCL(call)                                                                                                    \
    do {                                                                                                              \
        const ncclResult_t result = (call);                                                                           \
        if (result != ncclSuccess) {                                                                                  \
            std::printf("rank %d: %s: %s: %s\n", rank, #call, ncclGetErrorString(result), ncclGetLastError(nullptr)); \
            return false;                                                                                             \
        }                                                                                                             \
    } while (0)
#define CUDA(call)                                                                    \
    do {                                                                              \
        const cudaError_t error = (call);                                             \
        if (error != cudaSuccess) {                                                   \
            std::printf("rank %d: %s: %s\n", rank, #call, cudaGetErrorString(error)); \
            return false;                                                             \
        }                                                                             \
    } while (0)

__device__ long long now() {
    long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

__device__ bool await(const ncclGin& gin, int signal, unsigned long long least) {
    const long long deadline = now() + kPatience;
    while (gin.readSignal(signal) < least) {
        if (now() > deadline) return false;
    }
    return true;
}

__device__ unsigned char byte_of(int source, int target, int round, size_t at) {
    return static_cast<unsigned char>(source * 31 + target * 17 + round * 7 + at + (at >> 8));
}

// Everybody puts to everybody, of a size that changes with the round; result: 0, or where it went wrong.
// Window: what I send to each rank, then what each rank sends to me.
__global__ void all_to_all(ncclDevComm comm, ncclWindow_t window, unsigned char* mine, int* result) {
    ncclGin gin(comm, blockIdx.x);
    const ncclTeam world = ncclTeamWorld(comm);
    const int ranks = comm.nRanks, me = comm.rank;
    const size_t place = ranks * kChunk;
    __shared__ bool good;
    for (int round = 0; round < kRounds; ++round) {
        const size_t bytes = round % 4 == 0 ? round : round % 4 == 1 ? 1000 * round + 13 : round % 4 == 2 ? 4096 : kChunk;
        for (int peer = 0; peer < ranks; ++peer) {
            for (size_t i = threadIdx.x; i < bytes; i += blockDim.x) mine[peer * kChunk + i] = byte_of(me, peer, round, i);
        }
        __threadfence_system();
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int peer = 0; peer < ranks; ++peer) {
                // In two parts: the signal of the second says that both are there.
                const size_t half = bytes / 2;
                gin.put(world, peer, window, place + me * kChunk, window, peer * kChunk, half);
                gin.put(world, peer, window, place + me * kChunk + half, window, peer * kChunk + half, bytes - half,
                        ncclGin_StrongSignalInc{kArrived});
            }
            good = await(gin, kArrived, 1ull * ranks * (round + 1));
        }
        __syncthreads();
        if (!good) {
            if (threadIdx.x == 0) *result = 1000 + round;
            return;
        }
        for (int peer = 0; peer < ranks; ++peer) {
            for (size_t i = threadIdx.x; i < bytes; i += blockDim.x) {
                const unsigned char got = *reinterpret_cast<volatile unsigned char*>(mine + place + peer * kChunk + i);
                if (got != byte_of(peer, me, round, i)) *result = 2000 + round;
            }
        }
        gin.flush(ncclCoopCta());
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int peer = 0; peer < ranks; ++peer) gin.signal(world, peer, ncclGin_StrongSignalAdd{kChecked, 3});
            good = await(gin, kChecked, 3ull * ranks * (round + 1));
        }
        __syncthreads();
        if (!good) {
            if (threadIdx.x == 0) *result = 3000 + round;
            return;
        }
    }
}

// Inline values with a counter of what has left, and gets.
__global__ void values_and_gets(ncclDevComm comm, ncclWindow_t window, unsigned char* mine, int* result) {
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    const int ranks = comm.nRanks, me = comm.rank, next = (me + 1) % ranks, before = (me + ranks - 1) % ranks;
    if (threadIdx.x != 0) return;
    auto* words = reinterpret_cast<volatile unsigned long long*>(mine + ranks * kChunk);
    words[0] = 0;
    words[1] = 1000 + me;
    __threadfence_system();
    gin.signal(world, before, ncclGin_StrongSignalInc{kReady});  // my words are
    if (!await(gin, kReady, 1)) {
        *result = 4001;
        return;
    }
    gin.putValue(world, next, window, ranks * kChunk, 0x1122334455667788ull + me, ncclGin_StrongSignalInc{kValue});
    gin.get(world, next, window, ranks * kChunk + 8, window, ranks * kChunk + 64, 8);
    ncclGinRequest_t request;
    gin.flushAsync(world, next, &request);
    gin.wait(request);
    if (words[8] != 1000ull + next) *result = 4002;
    if (!await(gin, kValue, 1)) *result = 4003;
    if (words[0] != 0x1122334455667788ull + before) *result = 4004;
    gin.put(world, next, window, ranks * kChunk + 128, window, 0, 4096, ncclGin_None{}, ncclGin_WeakCounterInc{0});
    const long long deadline = now() + kPatience;
    while (gin.readCounter(0) < 1) {
        if (now() > deadline) {
            *result = 4005;
            return;
        }
    }
}

bool run(int rank, int ranks, const ncclUniqueId& id) {
    CUDA(cudaSetDevice(rank));
    ncclComm_t comm;
    NCCL(ncclCommInitRank(&comm, ranks, id, rank));
    ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    NCCL(ncclCommQueryProperties(comm, &properties));
    if (rank == 0) {
        std::printf("device API %d, GIN type %d (2: proxy), LSA teams %d\n", static_cast<int>(properties.deviceApiSupport),
                    static_cast<int>(properties.ginType), properties.nLsaTeams);
    }
    if (properties.ginType != NCCL_GIN_TYPE_PROXY) return false;
    const size_t size = 2 * ranks * kChunk;
    void* memory = nullptr;
    ncclWindow_t window = nullptr;
    NCCL(ncclMemAlloc(&memory, size));
    NCCL(ncclCommWindowRegister(comm, memory, size, &window, NCCL_WIN_COLL_SYMMETRIC));
    ncclDevCommRequirements wanted = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    wanted.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    wanted.ginContextCount = 2;
    wanted.ginSignalCount = kSignals;
    wanted.ginCounterCount = 1;
    ncclDevComm device;
    NCCL(ncclDevCommCreate(comm, &wanted, &device));
    auto* mine = static_cast<unsigned char*>(memory);
    int* result = nullptr;
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaHostAlloc(&result, sizeof *result, cudaHostAllocDefault));
    *result = 0;
    all_to_all<<<1, 512, 0, stream>>>(device, window, mine, result);
    CUDA(cudaStreamSynchronize(stream));
    if (*result == 0) values_and_gets<<<1, 32, 0, stream>>>(device, window, mine, result);
    CUDA(cudaStreamSynchronize(stream));
    std::printf("rank %d: %s %d\n", rank, *result == 0 ? "all bytes are right" : "WRONG:", *result);
    const bool good = *result == 0;
    ncclResult_t state = ncclSuccess;
    NCCL(ncclCommGetAsyncError(comm, &state));
    NCCL(state);
    NCCL(ncclDevCommDestroy(comm, &device));
    NCCL(ncclCommWindowDeregister(comm, window));
    NCCL(ncclMemFree(memory));
    NCCL(ncclCommDestroy(comm));
    return good;
}

int main(int count, char** words) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    if (count != 2 && count != 4) return 2;
    const int ranks = std::atoi(words[1]);
    ncclUniqueId id;
    if (count == 2) {
        if (ncclGetUniqueId(&id) != ncclSuccess) return 1;
        std::atomic<int> good{0};
        std::vector<std::thread> threads;
        for (int rank = 0; rank < ranks; ++rank) {
            threads.emplace_back([&, rank] { good += run(rank, ranks, id) ? 1 : 0; });
        }
        for (std::thread& thread : threads) thread.join();
        return good == ranks ? 0 : 1;
    }
    const int rank = std::atoi(words[2]);
    const std::string file = words[3], unfinished = file + ".new";
    if (rank == 0) {
        if (ncclGetUniqueId(&id) != ncclSuccess) return 1;
        std::FILE* out = std::fopen(unfinished.c_str(), "wb");
        if (out == nullptr || std::fwrite(&id, sizeof id, 1, out) != 1 || std::fclose(out) != 0) return 1;
        if (std::rename(unfinished.c_str(), file.c_str()) != 0) return 1;
    } else {
        std::FILE* in = nullptr;
        for (int tries = 0; tries < 6000 && in == nullptr; ++tries) {
            in = std::fopen(file.c_str(), "rb");
            if (in == nullptr) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        if (in == nullptr || std::fread(&id, sizeof id, 1, in) != 1) return 1;
        std::fclose(in);
    }
    return run(rank, ranks, id) ? 0 : 1;
}
