// Windows between CPU ranks, in plain C++17: docs/windows.md. A program that includes it links nothing of moecomm.
#pragma once
#include "../../window/cpu.h"
