// Entry points of the library: NCCL's two tables of functions. No exception leaves them.
#include <cstring>
#include <new>

#include "comm.h"
#include "log.h"
#include "losses.h"

namespace moecomm::rma {
namespace {

template <class Body>
abi::Result guarded(const Body& body) {
    try {
        body();
        return abi::kSuccess;
    } catch (const Failure& failure) {
        if (!failure.told) warn(failure.what());
        return failure.result();
    } catch (const std::exception& error) {
        warn(error.what());
        return abi::kSystemError;
    }
}

// A context of NCCL's is the settings; NCCL makes one for RMA and one for GIN.
abi::Result init(void** context, uint64_t, abi::Logger logger) {
    set_logger(logger);
    return guarded([&] {
        const Settings settings = read_settings();
        *context = new Settings(settings);
        if (settings.times) times::enable();
    });
}

abi::Result finalize(void* context) {
    delete static_cast<Settings*>(context);
    return abi::kSuccess;
}

abi::Result devices(int* count) {
    *count = 1;
    return abi::kSuccess;
}

abi::Result properties(int device, abi::Properties* to) {
    *to = {};
    to->name = "moecomm";  // no PCI path, so every GPU of the host has the same distance
    to->guid = 0x6d6f65636f6d6d;
    to->ptrSupport = abi::kPtrHost | abi::kPtrCuda;
    to->speed = 100000;
    to->maxComms = 1 << 20;
    to->maxRecvs = 8;  // queues of 256 operations to a peer; NCCL requires a power of two
    to->netDeviceType = abi::kGinProxy;
    to->vProps.ndevs = 1;
    to->vProps.devs[0] = device;
    to->maxP2pBytes = to->maxCollBytes = size_t{1} << 40;
    to->maxMultiRequestSize = 1;
    return abi::kSuccess;
}

abi::Result rma_properties(void*, abi::RmaProperties* to) {
    to->flushesAllPutsOnAnySignal = false;  // a signal of one peer does not cover another peer's puts
    return abi::kSuccess;
}

abi::Result listen(void*, int, void* handle, void** listener) {
    return guarded([&] {
        auto made = std::make_unique<Listener>(listen_here());
        std::memcpy(handle, &made->address, sizeof made->address);
        *listener = made.release();
    });
}

abi::Result close_listen(void* listener) {
    delete static_cast<Listener*>(listener);
    return abi::kSuccess;
}

abi::Result connect(void* context, void** handles, int ranks, int rank, void* listener, void** comm) {
    return guarded([&] {
        const auto& settings = *static_cast<Settings*>(context);
        std::vector<Address> addresses(static_cast<size_t>(ranks));
        for (int i = 0; i < ranks; ++i) std::memcpy(&addresses[i], handles[i], sizeof(Address));
        const std::shared_ptr<Gpu> gpu = Gpu::current();  // outlives in_context
        const InContext in_context(gpu.get());
        auto channels = connect_all(*static_cast<Listener*>(listener), addresses, rank, Clock::now() + settings.timeout);
        *comm = new Comm(std::move(channels), rank, settings, gpu);
    });
}

abi::Result close_coll(void* comm) {
    return guarded([&] {
        auto* closing = static_cast<Comm*>(comm);
        const std::shared_ptr<Gpu> gpu = closing->gpu();
        const InContext in_context(gpu.get());
        delete closing;
    });
}

abi::Result create_context(void* comm, abi::Config* config, void** rma) {
    return guarded([&] { *rma = static_cast<Comm*>(comm)->add_context(config->nContexts); });
}

abi::Result destroy_context(void* rma) {
    auto* context = static_cast<Context*>(rma);
    return guarded([&] { context->comm->remove_context(context); });
}

abi::Result reg_mr(void* comm, void* data, size_t bytes, int type, uint64_t flags, void** region) {
    return guarded([&] {
        if (type != abi::kPtrHost && type != abi::kPtrCuda) throw Failure(Fault::kUnsupported, "memory of an unknown kind");
        *region = static_cast<Comm*>(comm)->add_memory(data, bytes, type == abi::kPtrCuda, flags);
    });
}

abi::Result dereg_mr(void* comm, void* region) {
    return guarded([&] { static_cast<Comm*>(comm)->remove_memory(region); });
}

abi::Result iput(void* rma, int number, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region, uint32_t rank,
                 void** request) {
    auto& context = *static_cast<Context*>(rma);
    return guarded(
        [&] { *request = context.comm->put(context, number, static_cast<int>(rank), {from_region, from, to_region, to, bytes}, nullptr); });
}

abi::Result iput_signal(void* rma, int number, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region, uint32_t rank,
                        uint64_t signal, void* signal_region, uint64_t value, uint32_t op, bool, void** request) {
    auto& context = *static_cast<Context*>(rma);
    return guarded([&] {
        if (op != abi::kSignalInc && op != abi::kSignalAdd) throw Failure(Fault::kUnsupported, "a signal is added to, or counts up");
        // Weak signals are treated as strong ones: they cover all earlier puts.
        const Raise raise{signal_region, signal, op == abi::kSignalInc ? 1 : value};
        *request = context.comm->put(context, number, static_cast<int>(rank), {from_region, from, to_region, to, bytes}, &raise);
    });
}

abi::Result iget(void* rma, int number, uint64_t remote, void* remote_region, size_t bytes, uint64_t local, void* local_region,
                 uint32_t rank, void** request) {
    auto& context = *static_cast<Context*>(rma);
    return guarded([&] {
        *request = context.comm->get(context, number, static_cast<int>(rank), {local_region, local, remote_region, remote, bytes});
    });
}

abi::Result iflush(void* rma, int, void*, uint32_t, void** request) {
    return guarded([&] { *request = static_cast<Context*>(rma)->comm->flush(); });
}

abi::Result test(void* comm, void* request, int* done) {
    *done = 0;
    return guarded([&] { *done = static_cast<Comm*>(comm)->test(static_cast<Request*>(request)) ? 1 : 0; });
}

abi::Result progress(void* rma) {
    return guarded([&] { static_cast<Context*>(rma)->comm->progress(); });
}

abi::Result last_error(void* rma, bool* failed) {
    return guarded([&] { *failed = static_cast<Context*>(rma)->comm->failed(); });
}

abi::Result iput_16(void* rma, int number, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region, uint32_t rank,
                    uint32_t, void** request) {
    return iput(rma, number, from, from_region, bytes, to, to_region, rank, request);
}

abi::Result iput_signal_16(void* rma, int number, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region,
                           uint32_t rank, uint64_t signal, void* signal_region, uint64_t value, uint32_t op, bool strong, uint32_t,
                           void** request) {
    return iput_signal(rma, number, from, from_region, bytes, to, to_region, rank, signal, signal_region, value, op, strong, request);
}

abi::Result iget_16(void* rma, int number, uint64_t remote, void* remote_region, size_t bytes, uint64_t local, void* local_region,
                    uint32_t rank, uint32_t, void** request) {
    return iget(rma, number, remote, remote_region, bytes, local, local_region, rank, request);
}

}  // namespace
}  // namespace moecomm::rma

#define MOECOMM_EXPORT extern "C" __attribute__((visibility("default")))

MOECOMM_EXPORT int moecomm_rma_take_times(moecomm::rma::times::Taken* to);
int moecomm_rma_take_times(moecomm::rma::times::Taken* to) { return moecomm::rma::times::take(to); }

MOECOMM_EXPORT int moecomm_rma_watch(const char* job, uint32_t* word);
int moecomm_rma_watch(const char* job, uint32_t* word) {
    return moecomm::rma::guarded([&] { moecomm::rma::losses::watch(job, word); });
}

MOECOMM_EXPORT int moecomm_rma_ignore(const char* job, int rank, int ignored);
int moecomm_rma_ignore(const char* job, int rank, int ignored) {
    return moecomm::rma::guarded([&] { moecomm::rma::losses::ignore(job, rank, ignored != 0); });
}

MOECOMM_EXPORT int moecomm_rma_loss(const char* job, int number, char* text, size_t bytes);
int moecomm_rma_loss(const char* job, int number, char* text, size_t bytes) { return moecomm::rma::losses::nth(job, number, text, bytes); }

// regMrSymDmaBuf is null: NCCL calls it only for multi-segment windows with a dma-buf, which properties() does not offer.
MOECOMM_EXPORT const moecomm::rma::abi::RmaV14 ncclRmaPlugin_v14;
const moecomm::rma::abi::RmaV14 ncclRmaPlugin_v14 = {
    "moecomm",
    moecomm::rma::init,
    moecomm::rma::devices,
    moecomm::rma::properties,
    moecomm::rma::listen,
    moecomm::rma::connect,
    moecomm::rma::create_context,
    moecomm::rma::reg_mr,
    nullptr,
    moecomm::rma::dereg_mr,
    moecomm::rma::destroy_context,
    moecomm::rma::close_coll,
    moecomm::rma::close_listen,
    moecomm::rma::iput,
    moecomm::rma::iput_signal,
    moecomm::rma::iget,
    moecomm::rma::iflush,
    moecomm::rma::test,
    moecomm::rma::progress,
    moecomm::rma::last_error,
    moecomm::rma::finalize,
};

MOECOMM_EXPORT const moecomm::rma::abi::RmaV16 ncclRmaPlugin_v16;
const moecomm::rma::abi::RmaV16 ncclRmaPlugin_v16 = {
    "moecomm",
    moecomm::rma::init,
    moecomm::rma::devices,
    moecomm::rma::rma_properties,
    moecomm::rma::properties,
    moecomm::rma::listen,
    moecomm::rma::connect,
    moecomm::rma::create_context,
    moecomm::rma::reg_mr,
    nullptr,
    moecomm::rma::dereg_mr,
    moecomm::rma::destroy_context,
    moecomm::rma::close_coll,
    moecomm::rma::close_listen,
    moecomm::rma::iput_16,
    moecomm::rma::iput_signal_16,
    moecomm::rma::iget_16,
    moecomm::rma::iflush,
    moecomm::rma::test,
    moecomm::rma::progress,
    moecomm::rma::last_error,
    moecomm::rma::finalize,
};
