// Windows in kernels: docs/windows.md. For NVRTC and nvcc, C++17, from sm_90 on.
#pragma once
#include "../../window/window.cuh"
