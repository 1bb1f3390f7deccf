"""Imports Megatron-core, also where there is no Triton: the newest imports kernels that no dispatcher calls."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

if importlib.util.find_spec("triton") is None:  # CPU builds of torch come without it
    kernels = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    kernels.__dict__.update(GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None)
    sys.modules.setdefault(kernels.__name__, kernels)

import megatron.core

VERSION: str = megatron.core.__version__
