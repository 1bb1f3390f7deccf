#include "table.h"

#include <dlfcn.h>

#include "world.h"

namespace {

constexpr uint64_t kComm = 42;  // NCCL's number of the communicator; all of a test have the same

}  // namespace

Table::Table(void* library, int version) {
    require(version == 14 || version == 16, "there is no such table");
    if (version == 14) v14_ = static_cast<const abi::RmaV14*>(::dlsym(library, "ncclRmaPlugin_v14"));
    if (version == 16) v16_ = static_cast<const abi::RmaV16*>(::dlsym(library, "ncclRmaPlugin_v16"));
    require(v14_ != nullptr || v16_ != nullptr, "the plugin lacks a table");
}

abi::Result Table::init(void** context, abi::Logger logger) const {
    return call(&abi::RmaV14::init, &abi::RmaV16::init, context, kComm, logger);
}

abi::Result Table::rma_properties(void* comm, abi::RmaProperties* to) const {
    to->flushesAllPutsOnAnySignal = false;
    return v16_ == nullptr ? abi::kSuccess : note(*v16_, &abi::RmaV16::getRmaProperties)(comm, to);
}

abi::Result Table::listen(void* context, void* handle, void** listener) const {
    return call(&abi::RmaV14::listen, &abi::RmaV16::listen, context, 0, handle, listener);
}

abi::Result Table::connect(void* context, void** handles, int ranks, int rank, void* listener, void** comm) const {
    return call(&abi::RmaV14::connect, &abi::RmaV16::connect, context, handles, ranks, rank, listener, comm);
}

abi::Result Table::create_context(void* comm, int count, void** rma) const {
    abi::Config config{count, 0, 1};
    return call(&abi::RmaV14::createContext, &abi::RmaV16::createContext, comm, &config, rma);
}

abi::Result Table::reg_mr(void* comm, void* data, size_t bytes, int type, uint64_t flags, void** region) const {
    return call(&abi::RmaV14::regMrSym, &abi::RmaV16::regMrSym, comm, data, bytes, type, flags, region);
}

// Return the hints that NCCL may give, in turn: nothing, and that requests may be put together.
uint32_t Table::hints() const { return asked_++ % 2; }

abi::Result Table::put(void* rma, int context, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region, uint32_t rank,
                       void** request) const {
    if (v14_ != nullptr) return note(*v14_, &abi::RmaV14::iput)(rma, context, from, from_region, bytes, to, to_region, rank, request);
    return note(*v16_, &abi::RmaV16::iput)(rma, context, from, from_region, bytes, to, to_region, rank, hints(), request);
}

abi::Result Table::put_signal(void* rma, int context, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region,
                              uint32_t rank, uint64_t signal, void* signal_region, uint64_t value, uint32_t op, bool strong,
                              void** request) const {
    if (v14_ != nullptr) {
        return note(*v14_, &abi::RmaV14::iputSignal)(rma, context, from, from_region, bytes, to, to_region, rank, signal, signal_region,
                                                     value, op, strong, request);
    }
    return note(*v16_, &abi::RmaV16::iputSignal)(rma, context, from, from_region, bytes, to, to_region, rank, signal, signal_region, value,
                                                 op, strong, hints(), request);
}

abi::Result Table::get(void* rma, int context, uint64_t remote, void* remote_region, size_t bytes, uint64_t local, void* local_region,
                       uint32_t rank, void** request) const {
    if (v14_ != nullptr) {
        return note(*v14_, &abi::RmaV14::iget)(rma, context, remote, remote_region, bytes, local, local_region, rank, request);
    }
    return note(*v16_, &abi::RmaV16::iget)(rma, context, remote, remote_region, bytes, local, local_region, rank, hints(), request);
}

abi::Result Table::flush(void* rma, int context, void* region, uint32_t rank, void** request) const {
    return call(&abi::RmaV14::iflush, &abi::RmaV16::iflush, rma, context, region, rank, request);
}

std::string Table::never_called() const {
    const auto* table = v14_ != nullptr ? reinterpret_cast<void* const*>(v14_) : reinterpret_cast<void* const*>(v16_);
    const size_t entries = (v14_ != nullptr ? sizeof *v14_ : sizeof *v16_) / sizeof(void*);
    std::string places;
    for (size_t i = 1; i < entries; ++i) {  // behind the name
        if (table[i] != nullptr && !called_[i]) places += " " + std::to_string(i);
    }
    return places;
}
