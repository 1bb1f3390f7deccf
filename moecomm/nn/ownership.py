"""Modules whose parameters and buffers are experts of one rank: how they are marked, found, saved and loaded.

A mark holds for everything below its module.  Parametrizations, pruning and adapters move parameters and add some, so
each question walks the tree anew; no parameter is on record.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch

from moecomm.nn.shard import ExpertShard

EXTRA_STATE = "_extra_state"  # torch's name
_SHARD = "_expert_shard"  # attribute of a marked module, which copies of it have as well
_lock = threading.Lock()
_marked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # those whose other experts are on other ranks


class Owned(NamedTuple):
    """A parameter or buffer of marked experts."""

    module: torch.nn.Module  # with the mark
    shard: ExpertShard
    is_numbered: bool  # its name has the number of its expert, and so is another on each rank


def mark(module: torch.nn.Module, shard: ExpertShard) -> None:
    """Mark all below a module as the experts of a shard; have its states name the experts."""
    vars(module)[_SHARD] = shard
    module.register_state_dict_post_hook(_pack_entries)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_unpack_entries)  # type: ignore[no-untyped-call]


def enter(module: torch.nn.Module) -> None:
    """Enter a marked module among those whose other experts are on other ranks."""
    with _lock:
        _marked.add(module)


def shard_of(module: torch.nn.Module) -> ExpertShard | None:
    """Return the shard that a module itself is marked with."""
    return vars(module).get(_SHARD)


def marked_in(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, ExpertShard]]:
    """Return name, module and shard of the marked modules of a model."""
    named = ((name, module, shard_of(module)) for name, module in model.named_modules())
    return [(name, module, shard) for name, module, shard in named if shard is not None]


def marks_above(module: torch.nn.Module) -> Iterator[tuple[ExpertShard, str]]:
    """Return the shards of marked modules over several ranks that a module is below, and the prefix of its names."""
    for marked in _all_marked():
        paths = (f"{path}." if path else "" for path, part in marked.named_modules() if part is module)
        if (shard := shard_of(marked)) is not None and (path := next(paths, None)) is not None:
            yield shard, path


def _all_marked() -> list[torch.nn.Module]:
    with _lock:
        return list(_marked)


def owned_by_id() -> dict[int, Owned]:
    """Return all parameters and buffers of marked modules with experts on other ranks, by their id()."""
    owned: dict[int, Owned] = {}
    for module in _all_marked():
        if (shard := shard_of(module)) is not None:
            numbered = _numbered(module, shard)
            for name, tensor in tensors_of(module):
                owned[id(tensor)] = Owned(module, shard, name.startswith(numbered))
    return owned


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return names and tensors of the parameters and buffers below a module, each under all of its names."""
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def first_unnamed(module: torch.nn.Module, shard: ExpertShard) -> tuple[str, torch.Tensor] | None:
    """Return a parameter or buffer of which no state could say whose experts it has; None: there is none."""
    numbered = _numbered(module, shard)
    named = (name.startswith(numbered) or shard.has_entry_each(tensor) for name, tensor in tensors_of(module))
    return next((found for found, is_named in zip(tensors_of(module), named, strict=True) if not is_named), None)


def _numbered(module: torch.nn.Module, shard: ExpertShard) -> tuple[str, ...]:
    """Return the prefixes of the names in dicts of modules whose keys are the numbers of this rank's experts."""
    keys = {str(expert) for expert in shard.experts}
    parts = module.named_modules()
    dicts = (name for name, part in parts if isinstance(part, torch.nn.ModuleDict) and set(part) == keys)
    return tuple(f"{name}." if name else "" for name in dicts)


def _has_extra_state(module: torch.nn.Module) -> bool:
    """Return whether a class of the user's has an extra state of its own."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _pack_entries(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Have a state that torch has made name the experts.  Parameters themselves, by `keep_vars`, are left alone."""
    shard = shard_of(module)
    names = [name for name in state if name.startswith(prefix) and isinstance(state[name], torch.Tensor)]
    if shard is None or any(isinstance(state[name], torch.nn.Parameter) for name in names):
        return
    numbered = tuple(prefix + name for name in _numbered(module, shard))
    for name in names:
        if not name.startswith(numbered):
            state[name] = shard.pack(name, state[name])
    extra = shard.extra()
    if extra is not None and not _has_extra_state(module):
        state[prefix + EXTRA_STATE] = extra


def _unpack_entries(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """Take this rank's experts from a state, before torch loads it."""
    shard = shard_of(module)
    if shard is None:
        return
    extra = None if _has_extra_state(module) else state.pop(prefix + EXTRA_STATE, None)
    numbered = tuple(prefix + name for name in _numbered(module, shard))
    for name, value in list(state.items()):
        of_dict = next((start for start in numbered if name.startswith(start)), None)
        if of_dict is not None:
            number = name[len(of_dict) :].partition(".")[0]
            if number.isdecimal() and int(number) not in shard.experts:
                del state[name]  # an expert of another rank
        elif name.startswith(prefix) and isinstance(value, torch.Tensor):
            mine = shard.unpack(name, value, extra)
            is_assigned = local_metadata.get("assign_to_params_buffers", False)
            state[name] = mine.clone() if is_assigned and mine is not value else mine
