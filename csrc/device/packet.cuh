// Packets (csrc/protocol/packets.h) in kernels: a warp stores the lines, another warp polls for them. In each step, lane 8 * i + j holds
// words 2 * j and 2 * j + 1 of line i of the step; the last word of a line is its tag.
#pragma once
#include "../protocol/packets.h"
#include "lanes.cuh"
#include "wait.cuh"

namespace moecomm {

constexpr i32 kLineLanes = kLineBytes / 16, kStepLines = kWarp / kLineLanes, kPacketSteps = kPacketLines / kStepLines;

MOECOMM_FN i32 packet_line(i32 step) { return step * kStepLines + lane_id() / kLineLanes; }
MOECOMM_FN bool ends_line() { return lane_id() % kLineLanes == kLineLanes - 1; }
// Index of this lane's first content word in a step. The lane also has the next word, unless it ends the line.
MOECOMM_FN i32 packet_word(i32 step) { return packet_line(step) * kLineWords + 2 * (lane_id() % kLineLanes); }
// The step and the lane that hold a content word.
MOECOMM_BOTH constexpr i32 step_of(i32 word) { return word / kLineWords / kStepLines; }
MOECOMM_BOTH constexpr i32 lane_of(i32 word) { return word / kLineWords % kStepLines * kLineLanes + word % kLineWords / 2; }

// This lane's 16 bytes in each step of a packet.
struct PacketWords {
    ulonglong2 step[kPacketSteps];
};

// One lane's 16 bytes of a line, in one volatile access. Orders nothing by itself.
MOECOMM_FN void store_line_words(u8* to, const ulonglong2& words) {
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(words.x), "l"(words.y) : "memory");
}
MOECOMM_FN ulonglong2 load_line_words(const u8* from) {
    ulonglong2 words;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(words.x), "=l"(words.y) : "l"(from) : "memory");
    return words;
}

// Store one step of a packet of `lines` lines, tags included, to one receiver. Called by all lanes of a warp. Needs no fence: each line
// carries its tag. Cannot fail.
MOECOMM_FN void store_step(u8* packet, i32 lines, i32 step, ulonglong2 words, u32 tag) {
    if (ends_line()) words.y = line_tag(tag);
    if (packet_line(step) < lines) store_line_words(packet + step * kWarp * 16 + lane_id() * 16, words);
}

// The first `lines` lines of a packet, and lines `first` to `end` of the one that begins so many bytes before it, which a warp polls
// together.
template <i32 first, i32 end>
struct PolledLines {
    const u8* packet;
    i32 lines, before;
    // True if this lane polls a line in a step.
    MOECOMM_FN bool has(i32 step) const { return packet_line(step) < lines || is_other(step); }
    MOECOMM_FN static bool is_other(i32 step) { return first < end && packet_line(step) >= first && packet_line(step) < end; }
    // This lane's 16 bytes of it.
    MOECOMM_FN const u8* at(i32 step) const { return packet + (step * kWarp * 16 + lane_id() * 16 - (is_other(step) ? before : 0)); }
};

// Load lines once. Called by all lanes of a warp; true in all lanes if all are complete. Volatile loads, nothing to order: data and tag of
// a line arrive together.
template <class Lines>
MOECOMM_FN bool poll_lines(const Lines& lines, u32 tag, PacketWords& words) {
    bool here = true;
#pragma unroll
    for (i32 step = 0; step < kPacketSteps; ++step) {
        words.step[step] = {};  // no register keeps what the poll before it found
        if (lines.has(step)) words.step[step] = load_line_words(lines.at(step));
    }
#pragma unroll
    for (i32 step = 0; step < kPacketSteps; ++step)
        if (ends_line() && lines.has(step)) here = here && words.step[step].y == line_tag(tag);
    return __all_sync(kAllLanes, here);
}
MOECOMM_FN bool poll_packet(const u8* packet, i32 lines, u32 tag, PacketWords& words) {
    return poll_lines(PolledLines<0, 0>{packet, lines, 0}, tag, words);
}

constexpr i32 kPacketPolls = 64;  // loads of the complete packet before a warp polls the tags alone

// Wait for lines of `from`. Called by all lanes of a warp. False in all lanes on timeout or abort; the failure record is then filled. If
// times() is true, in one warp of the rank for a source, the wait is counted.
template <class Lines, class Times>
MOECOMM_FN bool await_lines(const Round& r, Phase phase, i32 from, const Lines& lines, PacketWords& words, Times times) {
    for (i32 look = 0; look < kPacketPolls; ++look) {
        if (poll_lines(lines, r.tag, words)) return true;
        if (look > 0 || !times()) continue;
        const auto* tag = reinterpret_cast<const u64*>(lines.packet + kLineBytes - sizeof(u64));
        const bool in_time = lane_id() != 0 || counted_wait(r, phase, from, tag, Counter::wait_dispatch);
        if (!__all_sync(kAllLanes, in_time)) return false;
    }
    // Each lane waits for the tags of its own lines. The reload after that finds the content.
    do {
        bool in_time = true;
        for (i32 step = 0; step < kPacketSteps && in_time; ++step) {
            if (!ends_line() || !lines.has(step)) continue;
            const auto* tag = reinterpret_cast<const u64*>(lines.at(step) + 8);
            in_time = wait_for(
                r, phase, from, r.tag, [&] { return load_relaxed(tag) == line_tag(r.tag); },
                [&] { return static_cast<i64>(signal_tag(load_relaxed(tag))); });
        }
        if (!__all_sync(kAllLanes, in_time)) return false;
    } while (!poll_lines(lines, r.tag, words));
    return true;
}

}  // namespace moecomm
