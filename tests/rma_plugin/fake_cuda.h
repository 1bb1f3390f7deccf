// Functions of the fake CUDA driver beside those of CUDA, by which tests set it up and read it.
#pragma once
#include <cstddef>

extern "C" {
void fake_context(bool there);                   // the calling thread has a context, as a user's thread has, or none
char* fake_allocate(size_t bytes, bool shared);  // memory of the GPU; shared: it can be exported, as a window's can
// Calls that may wait are errors on the calling thread, as on NCCL's, and elsewhere wait until this thread goes on.
void fake_nccl_thread(bool begins);
void fake_hold_copies(bool hold);  // while they are held none ends
int fake_open_copies();            // behind which an event has been recorded that has not ended
int fake_mapped_windows();
}
