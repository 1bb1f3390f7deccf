// Binary interface of NCCL's RMA plugins, versions 14 and 16, so that the build needs neither NCCL nor CUDA. Names follow NCCL's; the
// layouts were checked against its sources (2.30.7 and 2.32.3).
#pragma once
#include <cstddef>
#include <cstdint>

namespace moecomm::rma::abi {

enum Result : int {  // ncclResult_t
    kSuccess = 0,
    kUnhandledCudaError = 1,
    kSystemError = 2,
    kInternalError = 3,
    kInvalidArgument = 4,
    kInvalidUsage = 5,
    kRemoteError = 6,
};

constexpr int kLogWarn = 2, kLogInfo = 3;  // ncclDebugLogLevel
constexpr unsigned long kLogNet = 16;      // ncclDebugLogSubSys
using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

constexpr int kHandleBytes = 128;                          // NCCL_NET_HANDLE_MAXSIZE
constexpr int kPtrHost = 1, kPtrCuda = 2, kPtrDmaBuf = 4;  // NCCL_PTR_*
constexpr int kMaxRequests = 32;                           // NCCL_NET_MAX_REQUESTS
constexpr int kGinProxy = 2;                               // NCCL_NET_DEVICE_GIN_PROXY: makes NCCL's GIN type "proxy"
constexpr uint64_t kSignalNeverReset = 1 << 1;             // NCCL_NET_MR_FLAG_SIGNAL_NEVER_RESET
constexpr uint32_t kSignalInc = 1, kSignalAdd = 2;         // NCCL_NET_SIGNAL_OP_*

struct Properties {  // ncclNetProperties_v12_t
    const char* name;
    const char* pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;  // Mbit/s
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
    struct {
        int ndevs;
        int devs[8];
    } vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
    int16_t railId, planeId;
};
static_assert(sizeof(Properties) == 128 && offsetof(Properties, maxRecvs) == 52 && offsetof(Properties, netDeviceType) == 56 &&
                  offsetof(Properties, vProps) == 64 && offsetof(Properties, maxP2pBytes) == 104 && offsetof(Properties, railId) == 124,
              "ncclNetProperties_v12_t on 64 bits");

struct Config {  // ncclRmaConfig_v14_t; never read rankStride, which some NCCLs of this version lack
    int nContexts;
    int trafficClass;
    int rankStride;
};

struct RmaProperties {  // ncclRmaProperties_v16_t
    bool flushesAllPutsOnAnySignal;
};

struct RmaV14 {  // ncclRma_v14_t
    const char* name;
    Result (*init)(void** context, uint64_t comm_id, Logger logger);
    Result (*devices)(int* count);
    Result (*getProperties)(int device, Properties* properties);
    Result (*listen)(void* context, int device, void* handle, void** listener);
    Result (*connect)(void* context, void** handles, int ranks, int rank, void* listener, void** comm);
    Result (*createContext)(void* comm, Config* config, void** rma);
    Result (*regMrSym)(void* comm, void* data, size_t bytes, int type, uint64_t flags, void** region);
    Result (*regMrSymDmaBuf)(void* comm, void* data, size_t bytes, int type, uint64_t offset, int fd, uint64_t flags, void** region);
    Result (*deregMrSym)(void* comm, void* region);
    Result (*destroyContext)(void* rma);
    Result (*closeColl)(void* comm);
    Result (*closeListen)(void* listener);
    Result (*iput)(void* rma, int context, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region, uint32_t rank,
                   void** request);
    Result (*iputSignal)(void* rma, int context, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region,
                         uint32_t rank, uint64_t signal, void* signal_region, uint64_t value, uint32_t op, bool strong, void** request);
    Result (*iget)(void* rma, int context, uint64_t remote, void* remote_region, size_t bytes, uint64_t local, void* local_region,
                   uint32_t rank, void** request);
    Result (*iflush)(void* rma, int context, void* region, uint32_t rank, void** request);
    Result (*test)(void* comm, void* request, int* done);
    Result (*rmaProgress)(void* rma);
    Result (*queryLastError)(void* rma, bool* failed);
    Result (*finalize)(void* context);
};
static_assert(sizeof(RmaV14) == 168 && offsetof(RmaV14, regMrSym) == 56 && offsetof(RmaV14, iput) == 104 &&
                  offsetof(RmaV14, iputSignal) == 112 && offsetof(RmaV14, rmaProgress) == 144 && offsetof(RmaV14, finalize) == 160,
              "ncclRma_v14_t on 64 bits");

struct RmaV16 {  // ncclRma_v16_t: adds getRmaProperties, and a word of hints to puts and gets
    const char* name;
    Result (*init)(void** context, uint64_t comm_id, Logger logger);
    Result (*devices)(int* count);
    Result (*getRmaProperties)(void* comm, RmaProperties* properties);
    Result (*getProperties)(int device, Properties* properties);
    Result (*listen)(void* context, int device, void* handle, void** listener);
    Result (*connect)(void* context, void** handles, int ranks, int rank, void* listener, void** comm);
    Result (*createContext)(void* comm, Config* config, void** rma);
    Result (*regMrSym)(void* comm, void* data, size_t bytes, int type, uint64_t flags, void** region);
    Result (*regMrSymDmaBuf)(void* comm, void* data, size_t bytes, int type, uint64_t offset, int fd, uint64_t flags, void** region);
    Result (*deregMrSym)(void* comm, void* region);
    Result (*destroyContext)(void* rma);
    Result (*closeColl)(void* comm);
    Result (*closeListen)(void* listener);
    Result (*iput)(void* rma, int context, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region, uint32_t rank,
                   uint32_t hints, void** request);
    Result (*iputSignal)(void* rma, int context, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region,
                         uint32_t rank, uint64_t signal, void* signal_region, uint64_t value, uint32_t op, bool strong, uint32_t hints,
                         void** request);
    Result (*iget)(void* rma, int context, uint64_t remote, void* remote_region, size_t bytes, uint64_t local, void* local_region,
                   uint32_t rank, uint32_t hints, void** request);
    Result (*iflush)(void* rma, int context, void* region, uint32_t rank, void** request);
    Result (*test)(void* comm, void* request, int* done);
    Result (*rmaProgress)(void* rma);
    Result (*queryLastError)(void* rma, bool* failed);
    Result (*finalize)(void* context);
};
static_assert(sizeof(RmaV16) == 176 && offsetof(RmaV16, getProperties) == 32 && offsetof(RmaV16, iput) == 112 &&
                  offsetof(RmaV16, rmaProgress) == 152,
              "ncclRma_v16_t on 64 bits");

}  // namespace moecomm::rma::abi
