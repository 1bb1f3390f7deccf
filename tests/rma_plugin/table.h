// The one table of the plugin's that a test uses, as NCCL takes it from the library: no call goes past it, and each is noted.
#pragma once
#include <atomic>
#include <string>

#include "nccl_abi.h"

namespace abi = moecomm::rma::abi;

class Table {
  public:
    Table(void* library, int version);

    // By the name of the function, which has the same arguments in both versions.
    template <class Older, class Newer, class... Given>
    abi::Result call(Older abi::RmaV14::* older, Newer abi::RmaV16::* newer, Given... given) const {
        return v16_ != nullptr ? note(*v16_, newer)(given...) : note(*v14_, older)(given...);
    }
    abi::Result init(void** context, abi::Logger logger) const;
    abi::Result finalize(void* context) const { return call(&abi::RmaV14::finalize, &abi::RmaV16::finalize, context); }
    abi::Result devices(int* count) const { return call(&abi::RmaV14::devices, &abi::RmaV16::devices, count); }
    abi::Result properties(abi::Properties* to) const { return call(&abi::RmaV14::getProperties, &abi::RmaV16::getProperties, 0, to); }
    abi::Result rma_properties(void* comm, abi::RmaProperties* to) const;  // of an older plugin NCCL takes them to be false
    abi::Result listen(void* context, void* handle, void** listener) const;
    abi::Result connect(void* context, void** handles, int ranks, int rank, void* listener, void** comm) const;
    abi::Result close_listen(void* listener) const { return call(&abi::RmaV14::closeListen, &abi::RmaV16::closeListen, listener); }
    abi::Result close_coll(void* comm) const { return call(&abi::RmaV14::closeColl, &abi::RmaV16::closeColl, comm); }
    abi::Result create_context(void* comm, int count, void** rma) const;
    abi::Result destroy_context(void* rma) const { return call(&abi::RmaV14::destroyContext, &abi::RmaV16::destroyContext, rma); }
    abi::Result reg_mr(void* comm, void* data, size_t bytes, int type, uint64_t flags, void** region) const;
    abi::Result dereg_mr(void* comm, void* region) const { return call(&abi::RmaV14::deregMrSym, &abi::RmaV16::deregMrSym, comm, region); }
    bool has_dma_buf() const { return (v16_ != nullptr ? v16_->regMrSymDmaBuf : v14_->regMrSymDmaBuf) != nullptr; }

    abi::Result put(void* rma, int context, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region, uint32_t rank,
                    void** request) const;
    abi::Result put_signal(void* rma, int context, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region,
                           uint32_t rank, uint64_t signal, void* signal_region, uint64_t value, uint32_t op, bool strong,
                           void** request) const;
    abi::Result get(void* rma, int context, uint64_t remote, void* remote_region, size_t bytes, uint64_t local, void* local_region,
                    uint32_t rank, void** request) const;
    abi::Result flush(void* rma, int context, void* region, uint32_t rank, void** request) const;
    abi::Result test(void* comm, void* request, int* done) const {
        return call(&abi::RmaV14::test, &abi::RmaV16::test, comm, request, done);
    }
    abi::Result progress(void* rma) const { return call(&abi::RmaV14::rmaProgress, &abi::RmaV16::rmaProgress, rma); }
    abi::Result last_error(void* rma, bool* failed) const {
        return call(&abi::RmaV14::queryLastError, &abi::RmaV16::queryLastError, rma, failed);
    }

    std::string never_called() const;  // places in the table, of those that the plugin has; "": none

  private:
    // Both tables are a name and functions, so the place of a function is that of a pointer.
    template <class Of, class Function>
    Function note(const Of& table, Function Of::* function) const {
        const auto at = reinterpret_cast<const char*>(&(table.*function)) - reinterpret_cast<const char*>(&table);
        called_[static_cast<size_t>(at) / sizeof(void*)] = true;
        return table.*function;
    }
    uint32_t hints() const;

    const abi::RmaV14* v14_ = nullptr;
    const abi::RmaV16* v16_ = nullptr;
    mutable std::atomic<bool> called_[sizeof(abi::RmaV16) / sizeof(void*)] = {};
    mutable std::atomic<uint32_t> asked_{0};
};
