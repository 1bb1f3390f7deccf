// Run rounds of a session without a look at Python.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {
class RowChecks;
}

namespace moecomm::bindings {

class Runner {
  public:
    virtual ~Runner() = default;
    // True if a round on this many workers can run as the last one did.  Else the session has to look.
    virtual bool ready(i32 workers) = 0;
    // Run (CPU ranks) or enqueue (GPUs) a round.  Needs the GIL, and gives it up meanwhile.
    virtual void run(const DispatchArgs& args) = 0;
    virtual void run(const CombineArgs& args) = 0;
};

// Run a round of this CPU rank, as host_dispatch and host_combine do.
void run_host_round(const DispatchArgs& args);
void run_host_round(const CombineArgs& args, host::RowChecks* checks = nullptr);

}  // namespace moecomm::bindings
