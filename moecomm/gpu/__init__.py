"""Kernels of this process: driver, NVRTC, cubins, linking, launches, and passes over rows with their CPU forms."""
