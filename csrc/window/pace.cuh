// Copies at a bounded rate (moecomm/window/pace.py): pieces by copy engines, and a pause after each.
#pragma once
#include "../device/globaltimer.cuh"
#include "call_args.h"

namespace moecomm {

// Wait until the copies so far may have ended at the wanted rate, of which the last takes `ns`. Called by all threads of one block. One
// thread waits, for at most `ns`, because copies that were slower are not made up for. Orders nothing: the stream does.
MOECOMM_FN void pause(const PauseArgs& a) {
    if (threadIdx.x != 0) return;
    u64& due = *reinterpret_cast<u64*>(a.due);
    const u64 begin = now_ns(), until = due + a.ns;
    for (u64 now = begin; now < until; now = now_ns()) doze(static_cast<u32>(min((until - now) / 2, u64{1} << 16)));
    due = max(until, begin);
}

}  // namespace moecomm
