"""Names of layers: a trace shows which layer of a model makes a round.

Each thread keeps the names of the layers that it is in. moecomm.rounds.spans reads the innermost one when a
traced round begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from moecomm.errors import BadInput

if TYPE_CHECKING:
    import torch

_thread = threading.local()  # .names: layers that this thread is in, the innermost last


def _names() -> list[str]:
    names: list[str] | None = getattr(_thread, "names", None)
    if names is None:
        names = _thread.names = []
    return names


def current() -> str:
    """Return the name of the innermost layer that this thread is in, "" outside any layer."""
    names = _names()
    return names[-1] if names else ""


@contextmanager
def layer(name: str) -> Iterator[None]:
    """Name the layer of all rounds that this thread makes inside the block, for traces and profilers.

    Spans of rounds and of their calls get the argument `layer`; NVTX ranges have the name behind the round.  Without a
    trace nothing reads the name.  `moecomm.trace(folder, model=)` names layers of nn.ExpertParallel and Megatron.

    Args:
        name: the name of the layer, such as "model.layers.3".

    Raises:
        BadInput: `name` is no name.
    """
    if not isinstance(name, str) or not name:
        raise BadInput("name", repr(name), "the name of a layer")
    names = _names()
    depth = len(names)
    names.append(name)
    try:
        yield
    finally:
        del names[depth:]


@contextmanager
def naming(model: torch.nn.Module) -> Iterator[None]:
    """Name the layers of a model by their modules, for as long as the block lasts.

    Raises:
        BadInput: `model` is no module, has no such layer, or is compiled.
    """
    layers = _layers_of(model)
    with ExitStack() as hooks:
        for name, module in layers:
            shown = name or "layer"
            before = module.register_forward_pre_hook(partial(_enter, shown), prepend=True)
            after = module.register_forward_hook(partial(_leave, shown), always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield


def _layers_of(model: Any) -> list[tuple[str, torch.nn.Module]]:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise BadInput("model", type(model).__name__, "a torch module")
    if any(map(is_compiled, model.modules())):
        raise BadInput("model", "a compiled module, whose layers run no hooks", "the module before torch.compile")
    layers = [item for item in model.named_modules() if getattr(type(item[1]), "_makes_rounds", False)]
    if not layers:
        got = type(model).__name__
        raise BadInput("model", got, "a module with a layer of nn.ExpertParallel or Megatron; else use moecomm.layer")
    return layers


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether torch.compile has replaced the module or its call."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _enter(name: str, *call: object) -> None:
    _names().append(name)


def _leave(name: str, *call: object) -> None:
    names = _names()
    if names and names[-1] == name:  # absent if the trace began in this forward pass
        names.pop()
