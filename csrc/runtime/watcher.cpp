#include "watcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "../host/during_waits.h"
#include "../protocol/order.h"
#include "../protocol/record.h"
#include "error.h"

namespace moecomm::runtime {
namespace {

constexpr int kLookEveryMs = 100;
constexpr long kPidfdOpen = 434;  // SYS_pidfd_open, the same number on every architecture; older headers lack the name

// The state letter of /proc/<pid>/stat, 0 if unreadable.  It follows the last ')', because a command's name may hold any character.
char process_state(int pid) {
    char path[32], text[512];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    Descriptor file(::open(path, O_RDONLY | O_CLOEXEC));
    if (!file.open()) return 0;
    const ssize_t got = ::read(file.get(), text, sizeof text - 1);
    if (got <= 0) return 0;
    text[got] = 0;
    const char* name_end = std::strrchr(text, ')');
    return name_end != nullptr && name_end[1] == ' ' ? name_end[2] : 0;
}

// True if the process has ended.  A zombie, which still accepts signals, counts as ended.
bool process_gone(int pid) {
    if (::kill(pid, 0) != 0 && errno == ESRCH) return true;
    const char state = process_state(pid);
    return state == 'Z' || state == 'X';
}

bool pidfd_gone(int pidfd) {
    pollfd ask{pidfd, POLLIN, 0};
    return ::poll(&ask, 1, 0) == 1 && (ask.revents & POLLIN) != 0;
}

}  // namespace

Descriptor pidfd_open(int pid) {
    Descriptor opened(static_cast<int>(::syscall(kPidfdOpen, pid, 0)));
    if (!opened.open()) throw_errno("pidfd_open");
    return opened;
}

Watcher::Watcher(const std::vector<int>& pids, int own_rank, std::vector<u64> abort_words, std::vector<u64> left_words, bool pidfds,
                 std::vector<Descriptor> passed)
    : owner_(::getpid()), abort_words_(std::move(abort_words)), left_words_(std::move(left_words)), ignored_(pids.size()) {
    for (int rank = 0; rank < static_cast<int>(pids.size()); ++rank) {
        if (rank == own_rank) continue;
        if (rank < static_cast<int>(passed.size()) && passed[rank].open()) {
            peers_.push_back({rank, pids[rank], std::move(passed[rank])});
            continue;
        }
        if (pids[rank] <= 0 || pids[rank] == owner_) continue;
        const int pidfd = pidfds ? static_cast<int>(::syscall(kPidfdOpen, pids[rank], 0)) : -1;
        peers_.push_back({rank, pids[rank], Descriptor(pidfd)});
    }
    if (peers_.empty()) return;
    wake_.reset(::eventfd(0, EFD_CLOEXEC));
    if (!wake_.open()) throw_errno("eventfd");
    thread_ = host::background_thread([this] { watch(); });
}

void Watcher::watch() {
    do {
        const auto gone = [this](const Peer& peer) {
            if (!(peer.pidfd.open() ? pidfd_gone(peer.pidfd.get()) : process_gone(peer.pid))) return false;
            report(peer);
            return true;
        };
        peers_.erase(std::remove_if(peers_.begin(), peers_.end(), gone), peers_.end());
    } while (wait());
}

bool Watcher::wait() {
    std::vector<pollfd> events{{wake_.get(), POLLIN, 0}};
    for (const Peer& peer : peers_)
        if (peer.pidfd.open()) events.push_back({peer.pidfd.get(), POLLIN, 0});
    const bool must_look = events.size() - 1 < peers_.size();
    ::poll(events.data(), events.size(), must_look ? kLookEveryMs : -1);
    return events[0].revents == 0;
}

bool Watcher::left(int rank) const {
    const u64 word = rank < static_cast<int>(left_words_.size()) ? left_words_[rank] : 0;
    return word != 0 && load_acquire(reinterpret_cast<const u32*>(word)) != 0;
}

void Watcher::report(const Peer& peer) {
    if (left(peer.rank)) return;
    std::lock_guard lock(mutex_);
    dead_.push_back(peer.rank);
    if (ignored_[peer.rank]) return;
    for (const u64 word : abort_words_) compare_exchange(reinterpret_cast<u32*>(word), 0, abort_word(Failure::peer_lost, peer.rank));
}

void Watcher::ignore(int rank, bool ignored) {
    std::lock_guard lock(mutex_);
    ignored_.at(rank) = ignored;
}

std::vector<int> Watcher::dead() const {
    std::lock_guard lock(mutex_);
    return dead_;
}

void Watcher::close() {
    std::lock_guard lock(closing_);
    if (!thread_.joinable()) return;
    if (::getpid() != owner_) {
        thread_.detach();
        return;
    }
    ::eventfd_write(wake_.get(), 1);
    thread_.join();
    peers_.clear();  // and their descriptors, which would be open for as long as a Python object refers to this one
    wake_.reset();
}

}  // namespace moecomm::runtime
