"""moecomm in vLLM (checked against 0.33): prepare and finalize for both activation formats, and their managers.

vLLM has no registry for them, so they take the place of DeepEP's, under the names of its backends: the standard format
with `--all2all-backend deepep_high_throughput`, the batched one with `deepep_low_latency`.  vLLM calls register() as a
plugin, in every process.  Its `deepep_v2` runs over moecomm.compat.deep_ep, and its `nixl_ep`, with which it grows and
shrinks, over moecomm.compat.nixl_ep.  docs/vllm.md says what works.
"""

from __future__ import annotations

import importlib.util
import logging
from contextlib import suppress

from moecomm import config
from moecomm.compat import install_as_deep_ep, install_as_nixl_ep
from moecomm.errors import Unsupported
from moecomm.integrations.doors import way_into_vllm

__all__ = ["register"]

log = logging.getLogger("moecomm")


def register() -> None:
    """Take DeepEP's place where there is no deep_ep; where there is one, only with MOECOMM_VLLM=always.

    Idempotent.  Changes names in two modules of vLLM, installs moecomm as deep_ep, and changes no file.

    Raises:
        Unsupported: MOECOMM_VLLM=always, and this vLLM has no such place; without it, a warning says so.
    """
    wanted = config.in_vllm()
    if wanted == "never" or (wanted is None and importlib.util.find_spec("deep_ep") is not None):
        return
    install_as_deep_ep(replace=wanted == "always")  # vLLM's modules look for it when they are imported
    with suppress(Unsupported):  # another nixl_ep is installed, and nobody asked for its place
        install_as_nixl_ep(replace=wanted == "always")
    try:
        _take_place()
    except (ImportError, Unsupported) as error:
        if wanted == "always":
            raise Unsupported(f"vLLM: {error}") from error
        log.warning("moecomm is not in vLLM: %s", error)


def _take_place() -> None:
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.platforms import current_platform

    from moecomm.integrations.vllm.batched import BatchedPrepareAndFinalize
    from moecomm.integrations.vllm.managers import BatchedManager, StandardManager
    from moecomm.integrations.vllm.standard import StandardPrepareAndFinalize

    looked_up = all2all_utils.maybe_make_prepare_finalize.__code__.co_names
    made = {
        "DeepEPHTPrepareAndFinalize": StandardPrepareAndFinalize,
        "DeepEPLLPrepareAndFinalize": BatchedPrepareAndFinalize,
    }
    managers = {"DeepEPHTAll2AllManager": StandardManager, "DeepEPLLAll2AllManager": BatchedManager}
    missing = [name for name in made if name not in looked_up]
    missing += [name for name in managers if not hasattr(all2all, name)]
    if missing:
        raise Unsupported(f"this version does not look for {', '.join(missing)}")
    for name, manager in managers.items():
        setattr(all2all, name, manager)
    for name, kind in made.items():
        setattr(all2all_utils, name, kind)
    all2all_utils.DEEPEP_QUANT_BLOCK_SHAPE = [128, 128]
    if current_platform.is_cpu():
        from moecomm.integrations.vllm.on_cpus import ManagerOnCpus, PrepareAndFinalizeOnCpus

        all2all_utils.DeepEPHTPrepareAndFinalize = PrepareAndFinalizeOnCpus
        if not isinstance(all2all.AgRsAll2AllManager, ManagerOnCpus):
            all2all.AgRsAll2AllManager = ManagerOnCpus(all2all.AgRsAll2AllManager)
    log.info("moecomm is vLLM's deepep_high_throughput and deepep_low_latency, %s", way_into_vllm())
