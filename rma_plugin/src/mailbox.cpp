#include "mailbox.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "failure.h"

namespace moecomm::rma {

struct Mailbox::Shared {
    alignas(128) std::atomic<uint64_t> posted;
    alignas(128) std::atomic<uint64_t> taken;
    alignas(128) std::atomic<uint64_t> left;
    alignas(128) Mail mail[kPlaces];
};

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share these words");

[[noreturn]] void fail(const char* call) { throw Failure(Fault::kSystem, std::string(call) + ": " + std::strerror(errno)); }

}  // namespace

Mailbox::~Mailbox() {
    if (shared_ != nullptr) ::munmap(shared_, sizeof(Shared));
}

void Mailbox::map(int fd) {
    void* at = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) fail("mmap");
    shared_ = static_cast<Shared*>(at);
}

Descriptor Mailbox::create() {
    Descriptor fd(::memfd_create("moecomm-rma-mail", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd.open()) fail("memfd_create");
    if (::ftruncate(fd.get(), sizeof(Shared)) != 0) fail("ftruncate");
    if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail("F_ADD_SEALS");
    map(fd.get());
    return fd;
}

void Mailbox::open(int fd) {
    struct stat status{};
    const int seals = ::fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals || ::fstat(fd, &status) != 0 || status.st_size != static_cast<off_t>(sizeof(Shared))) {
        throw Failure(Fault::kPeerLied, "what came as a mailbox is none");
    }
    map(fd);
}

bool Mailbox::post(const Mail& mail, int reader) {
    const uint64_t waiting = place_ - shared_->taken.load(std::memory_order_acquire);
    if (waiting > kPlaces) throw Failure(Fault::kPeerLied, rank_name(reader) + " has taken more mail than there was");
    if (waiting == kPlaces) return false;
    Mail& to = shared_->mail[place_ % kPlaces];
    to = mail;
    to.place = static_cast<uint32_t>(place_);
    shared_->posted.store(++place_, std::memory_order_release);
    return true;
}

bool Mailbox::take(Mail& mail, int writer) {
    const uint64_t waiting = shared_->posted.load(std::memory_order_acquire) - place_;
    if (waiting > kPlaces) throw Failure(Fault::kPeerLied, rank_name(writer) + " has posted more mail than there is room for");
    if (waiting == 0) return false;
    mail = shared_->mail[place_ % kPlaces];
    if (mail.place != static_cast<uint32_t>(place_)) throw Failure(Fault::kPeerLied, rank_name(writer) + " posts mail out of its place");
    shared_->taken.store(++place_, std::memory_order_release);
    return true;
}

void Mailbox::leave() { shared_->left.store(1, std::memory_order_release); }

bool Mailbox::left() const { return shared_->left.load(std::memory_order_acquire) != 0; }

}  // namespace moecomm::rma
