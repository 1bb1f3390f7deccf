// Named errors of the plugin. Thrown inside; NCCL gets a result code and, through its logger, the text.
#pragma once
#include <stdexcept>
#include <string>

#include "nccl_abi.h"

namespace moecomm::rma {

enum class Fault {
    kPeerLost,       // the connection to the peer broke
    kPeerSilent,     // the peer took and sent nothing for longer than the timeout
    kPeerClosed,     // the peer closed the communicator with operations open
    kPeerLied,       // the peer broke the protocol
    kNotReachable,   // the peer is on another host, or its memory cannot be mapped
    kConnectFailed,  // the peer did not connect, or did not accept, in time
    kOutOfRange,     // an offset or a length beyond a registered region
    kBadHandle,      // a handle that this communicator has not registered
    kQueueFull,      // too many operations at once
    kUnsupported,
    kSystem,
    kCuda,
};

inline const char* name_of(Fault fault) {
    switch (fault) {
        case Fault::kPeerLost:
            return "PeerLost";
        case Fault::kPeerSilent:
            return "PeerSilent";
        case Fault::kPeerClosed:
            return "PeerClosed";
        case Fault::kPeerLied:
            return "PeerLied";
        case Fault::kNotReachable:
            return "NotReachable";
        case Fault::kConnectFailed:
            return "ConnectFailed";
        case Fault::kOutOfRange:
            return "OutOfRange";
        case Fault::kBadHandle:
            return "BadHandle";
        case Fault::kQueueFull:
            return "QueueFull";
        case Fault::kUnsupported:
            return "Unsupported";
        case Fault::kSystem:
            return "System";
        case Fault::kCuda:
            return "Cuda";
    }
    return "?";
}

inline abi::Result result_of(Fault fault) {
    switch (fault) {
        case Fault::kOutOfRange:
        case Fault::kBadHandle:
            return abi::kInvalidArgument;
        case Fault::kQueueFull:
            return abi::kInternalError;
        case Fault::kUnsupported:
            return abi::kInvalidUsage;
        case Fault::kSystem:
        case Fault::kNotReachable:
            return abi::kSystemError;
        case Fault::kCuda:
            return abi::kUnhandledCudaError;
        default:
            return abi::kRemoteError;
    }
}

class Failure : public std::runtime_error {
  public:
    Failure(Fault fault, const std::string& text)
        : std::runtime_error(std::string(name_of(fault)) + ": " + text), fault_(fault), text_(text) {}
    Fault fault() const { return fault_; }
    const std::string& text() const { return text_; }  // without the fault's name
    abi::Result result() const { return result_of(fault_); }
    bool told = false;  // already in NCCL's log

  private:
    Fault fault_;
    std::string text_;
};

inline std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

}  // namespace moecomm::rma
