#pragma once

// Functions that are compiled for baseline x86-64, AVX2 and AVX-512, of which one is chosen when the library is loaded.  Not under
// ThreadSanitizer, whose runtime is not initialized at that time.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define MOECOMM_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define MOECOMM_CLONES
#endif
