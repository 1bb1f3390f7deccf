#include "../protocol/deadline.h"
#include "../window/pace.h"
#include "during_waits.h"

namespace moecomm {

u64 now_ns() { return monotonic_ns(); }
void back_off(u32 tries) {
    pace(tries, [] { host::DuringWaits::look(); });
}

}  // namespace moecomm
