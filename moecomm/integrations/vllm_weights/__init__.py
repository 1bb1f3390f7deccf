"""Both sides of vLLM's weight transfer over moecomm (checked against vLLM 0.33); see docs/vllm.md.

vLLM's factories take engines by name, so nothing of vLLM is replaced.
"""

from __future__ import annotations

import logging
from contextlib import suppress

__all__ = ["register"]

NAME = "moecomm"
log = logging.getLogger("moecomm")


def register() -> None:
    """Add the engines of workers and trainers to vLLM's factories, under the name "moecomm".

    vLLM calls this as a plugin, in every process; a trainer calls it itself.  Idempotent.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    except ImportError as error:
        log.debug("moecomm moves no weights in this version of vLLM: %s", error)
        return
    for factory, kind in ((WeightTransferEngineFactory, "Worker"), (WeightTransferTrainerFactory, "Trainer")):
        with suppress(ValueError):  # it has the name already
            factory.register_engine(NAME, f"{__name__}.engines", f"Moecomm{kind}")
