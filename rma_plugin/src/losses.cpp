#include "losses.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "protocol/order.h"
#include "protocol/record.h"

namespace moecomm::rma::losses {
namespace {

struct Loss {
    int rank;
    std::string text;
};
struct Job {
    uint32_t* word;
    std::vector<Loss> losses;
    std::set<int> ignored;
};
std::mutex mutex;

std::map<std::string, Job>& jobs() {
    static auto* const all = new std::map<std::string, Job>;  // never destroyed: NCCL's threads may outlive static destructors
    return *all;
}

}  // namespace

void watch(const std::string& job, uint32_t* word) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (word != nullptr) {
        jobs()[job] = {word, {}, {}};
    } else {
        jobs().erase(job);
    }
}

void ignore(const std::string& job, int rank, bool ignored) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = jobs().find(job);
    if (found == jobs().end()) return;
    if (ignored) {
        found->second.ignored.insert(rank);
    } else {
        found->second.ignored.erase(rank);
    }
}

bool tell(const std::string& job, int own_rank, int rank, const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = jobs().find(job);
    if (found == jobs().end()) return false;
    Job& watched = found->second;
    watched.losses.push_back({rank, what});
    const auto cause = rank == own_rank ? moecomm::Failure::aborted : moecomm::Failure::peer_lost;
    if (watched.ignored.count(rank) == 0) compare_exchange(watched.word, 0, abort_word(cause, rank));
    return true;
}

int nth(const std::string& job, int number, char* text, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = jobs().find(job);
    if (found == jobs().end() || number < 0 || static_cast<size_t>(number) >= found->second.losses.size() || bytes == 0) return -1;
    const Loss& loss = found->second.losses[static_cast<size_t>(number)];
    const size_t length = std::min(loss.text.size(), bytes - 1);
    std::memcpy(text, loss.text.data(), length);
    text[length] = 0;
    return loss.rank;
}

}  // namespace moecomm::rma::losses
