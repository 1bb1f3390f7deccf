// Operating system errors.  Python raises the OSError subclass of their errno: TimeoutError, ConnectionRefusedError, ...
#pragma once
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace moecomm::runtime {

struct OsError : std::runtime_error {
    OsError(int number, const std::string& what) : std::runtime_error(what), number(number) {}
    int number;  // errno
};

[[noreturn]] inline void throw_errno(const std::string& call) {
    const int number = errno;
    throw OsError(number, call + ": " + std::strerror(number));
}

}  // namespace moecomm::runtime
