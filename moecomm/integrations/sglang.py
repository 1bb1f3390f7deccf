"""moecomm in SGLang (checked against 0.5.23): its DeepEP and NIXL-EP dispatchers run over moecomm.compat.

SGLang calls register() as a plugin, in every process, before it imports deep_ep.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

from moecomm import config
from moecomm.compat import install_as_deep_ep, install_as_nixl_ep
from moecomm.errors import Unsupported
from moecomm.integrations.doors import SGLANG

__all__ = ["register"]

log = logging.getLogger("moecomm")
_DISPATCHER = "sglang.srt.layers.moe.token_dispatcher.deepep"


def register() -> None:
    """Install moecomm as deep_ep and nixl_ep where there are none, and with MOECOMM_SGLANG=always where there are.

    Idempotent.
    """
    wanted = config.in_sglang()
    if wanted == "never":
        return
    with suppress(Unsupported):  # another nixl_ep is installed, and nobody asked for its place
        install_as_nixl_ep(replace=wanted == "always")  # its dispatcher looks for it when it opens a buffer
    if _DISPATCHER in sys.modules and sys.modules.get("deep_ep") is not sys.modules.get("moecomm.compat.deep_ep"):
        log.warning("moecomm is not in SGLang: its dispatcher has looked for deep_ep before plugins were loaded")
        return
    try:
        install_as_deep_ep(replace=wanted == "always")
    except Unsupported:  # another deep_ep is installed, and nobody asked for its place
        return
    log.info("moecomm is SGLang's deep_ep, %s", SGLANG)
