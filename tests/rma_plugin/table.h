// One of the plugin's tables, as NCCL takes it from the library, in the form of the newest.
#pragma once
#include <dlfcn.h>

#include <cstring>

#include "nccl_abi.h"
#include "world.h"

class Table : public abi::RmaV16 {
  public:
    Table(void* library, int version) : RmaV16() {
        if (version == 16) {
            const auto* newest = static_cast<const abi::RmaV16*>(::dlsym(library, "ncclRmaPlugin_v16"));
            require(newest != nullptr, "the plugin lacks a table");
            static_cast<abi::RmaV16&>(*this) = *newest;
            return;
        }
        require(version == 14 && older(library) != nullptr, "the plugin lacks a table");
        // The older one has the same functions, but one, and in the same order; three of them take no hints.
        const size_t before = offsetof(abi::RmaV16, getRmaProperties);
        std::memcpy(static_cast<void*>(this), older(), before);
        std::memcpy(static_cast<void*>(&getProperties), &older()->getProperties, sizeof(abi::RmaV14) - before);
        getRmaProperties = [](void*, abi::RmaProperties* to) { return to->flushesAllPutsOnAnySignal = false, abi::kSuccess; };
        iput = [](void* rma, int context, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region, uint32_t rank,
                  uint32_t, void** request) { return older()->iput(rma, context, from, from_region, bytes, to, to_region, rank, request); };
        iputSignal = [](void* rma, int context, uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region, uint32_t rank,
                        uint64_t at, void* region, uint64_t value, uint32_t op, bool strong, uint32_t, void** request) {
            return older()->iputSignal(rma, context, from, from_region, bytes, to, to_region, rank, at, region, value, op, strong, request);
        };
        iget = [](void* rma, int context, uint64_t remote, void* remote_region, size_t bytes, uint64_t local, void* local_region,
                  uint32_t rank, uint32_t,
                  void** request) { return older()->iget(rma, context, remote, remote_region, bytes, local, local_region, rank, request); };
    }

  private:
    // The table of the first library that is given: a test loads one.
    static const abi::RmaV14* older(void* library = nullptr) {
        static const auto* const table = static_cast<const abi::RmaV14*>(::dlsym(library, "ncclRmaPlugin_v14"));
        return table;
    }
};
