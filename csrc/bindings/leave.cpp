// The last round header of a GPU rank that closes its Buffer, as bytes that the host copies into windows.
#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <vector>

#include "../protocol/domains.h"
#include "../protocol/round_header.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

// `last_round`: -1 where no round has been.
u32 tag_after(i64 last_round) { return round_tag(static_cast<u32>(last_round + 1)); }

RoundHeader leaving() {
    RoundHeader header{};
    header.op = static_cast<u32>(Op::leave);
    return header;
}

py::bytes leave_words(i64 last_round, i32 words) {
    const RoundHeader header = leaving();
    std::vector<u64> tagged(words, word_signal(tag_after(last_round), 0));
    for (i32 i = 0; i < kHeaderWords; ++i) {
        u32 word = 0;
        std::memcpy(&word, reinterpret_cast<const u8*>(&header) + i * sizeof word, sizeof word);
        tagged[i] = word_signal(tag_after(last_round), word);
    }
    return {reinterpret_cast<const char*>(tagged.data()), tagged.size() * sizeof(u64)};
}

py::bytes leave_signal(i64 last_round) {
    const u64 value = tagged_words_value(tag_after(last_round));
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

i64 leave_offset(const WindowLayout& window, i32 ranks, i64 last_round, i32 sender) {
    const i64 place = static_cast<i64>(round_parity(tag_after(last_round))) * ranks + sender;
    return static_cast<i64>(window.tagged_words) + place * window.num_tagged_words * static_cast<i64>(sizeof(u64));
}

}  // namespace

void bind_leave(py::module_& m) {
    m.def("leave_words", &leave_words, py::arg("last_round"), py::arg("words"),
          "The tagged words of a rank that leaves after `last_round`: `words` of 8 bytes, each valid by itself.");
    m.def("leave_signal", &leave_signal, py::arg("last_round"), "The value of the signal of these words in a window of another domain.");
    m.def("leave_offset", &leave_offset, py::arg("window"), py::arg("ranks"), py::arg("last_round"), py::arg("sender"),
          "Offset in a peer's window at which the words of `sender` belong.");
}

}  // namespace moecomm::bindings
