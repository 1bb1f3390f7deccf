#include "interrupt.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>

#include "../protocol/order.h"
#include "../protocol/record.h"
#include "error.h"
#include "quiet_thread.h"

namespace moecomm::runtime {

Interrupter& Interrupter::instance() {
    static Interrupter* interrupter = nullptr;  // never freed: its thread may outlive everything else
    static pid_t owner = 0;
    if (owner != ::getpid()) {
        interrupter = new Interrupter;
        owner = ::getpid();
    }
    return *interrupter;
}

Interrupter::Interrupter() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw_errno("pipe");
    read_end_.reset(ends[0]);
    write_end_.reset(ends[1]);
    quiet_thread([this] { watch(); }).detach();
}

void Interrupter::watch() {
    for (;;) {
        pollfd ready{read_end_.get(), POLLIN, 0};
        ::poll(&ready, 1, -1);
        std::lock_guard lock(mutex_);
        read_signals();
    }
}

void Interrupter::read_signals() {
    u8 number;
    while (::read(read_end_.get(), &number, 1) == 1) {
        // If that one is full, its reader wakes up anyway.
        [[maybe_unused]] const bool forwarded = forward_to_ < 0 || ::write(forward_to_, &number, 1) == 1;
        if (number != SIGINT) continue;
        interrupted_ = true;
        for (const AbortWord& word : words_)
            compare_exchange(reinterpret_cast<u32*>(word.address), 0, abort_word(Failure::aborted, word.rank));
    }
}

void Interrupter::arm(std::vector<AbortWord> words, int forward_to) {
    std::lock_guard lock(mutex_);
    words_ = std::move(words);
    forward_to_ = forward_to;
    interrupted_ = false;
}

bool Interrupter::disarm() {
    std::lock_guard lock(mutex_);
    read_signals();  // so that a late byte does not hit the next round
    words_.clear();
    forward_to_ = -1;
    return interrupted_;
}

}  // namespace moecomm::runtime
