"""Entry of moecomm into installed engines: through a door of the engine, or by replacing its names.

An engine's plugin group calls moecomm.  What follows is a door where the engine has a registry that carries all that
moecomm needs.  docs/maintainers/decisions.md says what the registries of vLLM and SGLang lack.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from importlib.machinery import PathFinder
from pathlib import Path

from moecomm import config

VLLM = "by replaced names: this version has no registry of all-to-all backends"
SGLANG = "in the place of the module deep_ep: hooks of this version do not reach what its dispatchers import"
_OPEN = "by replaced names; this version has a registry of all-to-all backends, which moecomm does not know yet"
_REGISTRY = "register_moe_prepare_finalize"  # vllm#50556


def way_into_vllm() -> str:
    """Return how the plugin comes into the installed vLLM, whose source it reads."""
    found = PathFinder.find_spec("vllm")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        with contextlib.suppress(OSError):
            if _REGISTRY in (Path(folder) / "model_executor/layers/fused_moe/all2all_utils.py").read_text():
                return _OPEN
    return VLLM


def ways() -> dict[str, str]:
    """Return for each engine that is installed here how moecomm comes into it, or why not.  Imports no engine."""
    shown = {}
    for engine, package, variable, wanted, way in (
        ("vLLM", "vllm", "MOECOMM_VLLM", config.in_vllm(), way_into_vllm),
        ("SGLang", "sglang", "MOECOMM_SGLANG", config.in_sglang(), lambda: SGLANG),
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            name = f"{engine} {importlib.metadata.version(package)}"
            if wanted == "never":
                shown[name] = f"not in use: {variable}=never"
            elif wanted is None and PathFinder.find_spec("deep_ep") is not None:
                shown[name] = f"not in use: deep_ep is installed; {variable}=always takes its place"
            else:
                shown[name] = way()
    return shown
