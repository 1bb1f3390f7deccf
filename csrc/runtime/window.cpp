#include "window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "error.h"

namespace moecomm::runtime {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, Linux 6.3

Descriptor create_memory(u64 bytes) {
    const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    // Hardened systems refuse memory that could be made executable; older kernels reject the flag.
    int fd = ::memfd_create("moecomm", flags | kNoExecSeal);
    if (fd < 0 && errno == EINVAL) fd = ::memfd_create("moecomm", flags);
    if (fd < 0) throw_errno("memfd_create");
    Descriptor memory(fd);
    if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw_errno("ftruncate of a window of " + std::to_string(bytes) + " bytes");
    if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0) throw_errno("fcntl(F_ADD_SEALS)");
    return memory;
}

void check_memory(int fd, u64 bytes) {
    const int seals = ::fcntl(fd, F_GET_SEALS);
    if (seals < 0) throw std::invalid_argument("the file descriptor of a peer is not that of a window");
    if ((seals & kSeals) != kSeals) throw std::invalid_argument("the window of a peer is not sealed against a change of its size");
    struct stat status{};
    if (::fstat(fd, &status) != 0) throw_errno("fstat");
    if (static_cast<u64>(status.st_size) != bytes)
        throw std::invalid_argument("the window of a peer has " + std::to_string(status.st_size) + " bytes instead of " +
                                    std::to_string(bytes));
}

}  // namespace

HostWindow::HostWindow(u64 bytes) : bytes_(bytes) {
    if (bytes == 0) throw std::invalid_argument("a window needs at least one byte");
    fd_ = create_memory(bytes);
    map();
}

HostWindow::HostWindow(Descriptor fd, u64 bytes) : fd_(std::move(fd)), bytes_(bytes) {
    check_memory(fd_.get(), bytes);
    map();
}

void HostWindow::map() {
    void* at = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (at == MAP_FAILED) throw_errno("mmap of a window of " + std::to_string(bytes_) + " bytes");
    address_ = reinterpret_cast<u64>(at);
}

u64 HostWindow::release(u64 from) {
    if (from > bytes_ || address_ == 0) throw std::invalid_argument("the offset lies outside of the window, or the window is closed");
    const u64 kept = std::min(bytes_, align_up(from, static_cast<u64>(::sysconf(_SC_PAGESIZE))));
    // A hole leaves the size as it is, so the seals allow it; F_SEAL_WRITE, which would forbid it, no rank can add.
    const auto begin = static_cast<off_t>(kept), size = static_cast<off_t>(bytes_ - kept);
    if (size > 0 && ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, size) != 0)
        throw_errno("fallocate of a hole of " + std::to_string(size) + " bytes in a window");
    return kept;
}

void HostWindow::close() {
    if (address_ != 0) ::munmap(reinterpret_cast<void*>(address_), bytes_);
    address_ = 0;
    fd_.reset();
}

}  // namespace moecomm::runtime
