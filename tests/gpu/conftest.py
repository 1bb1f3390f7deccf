"""Virtual ranks need a hardware queue each; CUDA reads this when it starts, which is after tests are collected."""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
