// A driver that launches nothing and says what it was asked for, on stdout.  WITHOUT_EX: one from before cuLaunchKernelEx.
#include <cstdio>
#include <cstdlib>
#include <cstring>

struct Attribute {
    int id, pad;
    unsigned value[16];
};
struct Config {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    Attribute* attributes;
    unsigned attribute_count;
};

static void say(const char* how, void* function, unsigned grid, unsigned block, unsigned shared, void* stream, void** params) {
    unsigned long long first;
    std::memcpy(&first, params[0], sizeof first);
    std::printf("%s %p %u %u %u %p %llu\n", how, function, grid, block, shared, stream, first);
    std::fflush(stdout);
}

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) {
    *count = 1;
    return 0;
}
int cuGetErrorName(int result, const char** name) {
    *name = result == 400 ? "CUDA_ERROR_INVALID_HANDLE" : "CUDA_ERROR_UNKNOWN";
    return 0;
}
int cuCtxGetCurrent(void** context) {
    *context = reinterpret_cast<void*>(std::getenv("FAKE_OTHER_CONTEXT") != nullptr ? 0x78 : 0x77);
    return 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
    *status = stream == reinterpret_cast<void*>(0x5) || std::getenv("FAKE_CAPTURING") != nullptr ? 1 : 0;
    return stream == reinterpret_cast<void*>(0x6) ? 400 : 0;
}
int cuLaunchKernel(void* function, unsigned x, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned shared, void* stream,
                   void** params, void**) {
    say("plain", function, x, block, shared, stream, params);
    return function == reinterpret_cast<void*>(0xbad) ? 400 : 0;
}
#ifndef WITHOUT_EX
int cuLaunchKernelEx(const Config* config, void* function, void** params, void**) {
    char how[64] = "", *end = how;
    for (unsigned i = 0; i < config->attribute_count; ++i) {
        const Attribute& a = config->attributes[i];
        if (end != how) *end++ = ' ';
        if (a.id == 6 && a.value[0] == 1) {
            end += std::sprintf(end, "overlap");
        } else if (a.id == 4 && a.value[1] * a.value[2] == 1) {
            end += std::sprintf(end, "clusters of %u", a.value[0]);
        } else {
            end += std::sprintf(end, "?");
        }
    }
    const bool one = config->grid[1] * config->grid[2] * config->block[1] * config->block[2] == 1;
    say(one ? how : "?", function, config->grid[0], config->block[0], config->shared_bytes, config->stream, params);
    return function == reinterpret_cast<void*>(0xbad) ? 400 : 0;
}
#endif
}
