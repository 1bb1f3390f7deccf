"""State dicts of models with ExpertParallel layers: split one with all experts over ranks, and gather it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from moecomm.base.experts import experts_of
from moecomm.base.validation import check_dense, check_integer, is_integer
from moecomm.errors import BadInput
from moecomm.nn.experts import EXTRA_STATE
from moecomm.nn.shard import is_dtensor, local_of
from moecomm.ranks.rendezvous import rendezvous

if TYPE_CHECKING:
    import torch.distributed as dist

EXTRA = f"experts.{EXTRA_STATE}"
# Suffixes of the names of tensors that are sharded along the experts.
SHARDED = ("experts.w13", "experts.w2", "experts.w13_bias", "experts.w2_bias")


def is_sharded(name: str) -> bool:
    """Return whether a tensor of that name is sharded over ranks; other tensors are replicated."""
    return any(_ends(name, end) for end in SHARDED)


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def shard_state(state: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """Extract the state of one rank from a state with the weights of all experts.

    load_state_dict() does it by itself: it takes a rank's experts from a state that has all.

    Args:
        state: state_dict of a model whose ExpertParallel layers all have `[E, ...]` weights.
        rank: the rank.
        num_ranks: R, ranks of the group.  If it does not divide E, the first E % R ranks have one expert more.

    Returns:
        The same names; weights of experts are views of shape `[E/R, ...]`.

    Raises:
        BadInput: E is smaller than R; a rank out of range; not a state_dict, or that of one rank of several.
    """
    _check_state(state)
    for name, value in state.items():
        if _ends(name, EXTRA) or (is_sharded(name) and is_dtensor(value)):
            raise BadInput("state", f"{name} of one rank of several", "what gather_state() returns")
    check_integer("num_ranks", num_ranks, 1)
    if not is_integer(rank) or not 0 <= rank < num_ranks:
        raise BadInput("rank", repr(rank), f"0 to {num_ranks - 1}")
    cut = {}
    for name, tensor in state.items():
        if is_sharded(name):
            if tensor.ndim == 0 or tensor.shape[0] < num_ranks:
                raise BadInput("state", f"{tuple(tensor.shape)} in {name}", f"[E, ...], E at least {num_ranks} ranks")
            mine = experts_of(rank, tensor.shape[0], num_ranks)
            tensor = tensor[mine.start : mine.stop]
        cut[name] = tensor
    return cut


def gather_state(
    state: Mapping[str, torch.Tensor], group: dist.ProcessGroup | str | None = None
) -> dict[str, torch.Tensor]:
    """Gather the weights of all experts from all ranks.  Collective.

    Args:
        state: this rank's state_dict.
        group: the group of the ExpertParallel layers, with a backend for the tensors' device; "self": one rank; None:
            see Buffer.

    Returns:
        The same names, on every rank; weights of experts are tensors `[E, ...]`, which a layer of any number of ranks
        loads.

    Raises:
        BadInput: another group; not a state_dict.
    """
    _check_state(state)
    state = {name: value for name, value in state.items() if not _ends(name, EXTRA)}
    if group is None or isinstance(group, str):
        rendezvous(group)  # raises unless it is one rank
        return state
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        raise BadInput("group", type(group).__name__, "a torch.distributed ProcessGroup, or None")

    whole = {}
    for name in sorted(state):  # the same order of collectives on all ranks
        tensor = state[name]
        if is_sharded(name):
            tensor = _gathered(local_of(name, tensor)[0] if is_dtensor(tensor) else tensor.detach(), group)
        whole[name] = tensor
    return {name: whole[name] for name in state}


def _check_state(state: Any) -> None:
    """Raise BadInput unless `state` is a mapping whose sharded entries are tensors; other entries may be anything."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise BadInput("state", type(state).__name__, "tensors by name, as a state_dict has them")
    for name, tensor in state.items():
        if is_sharded(name) and not is_dtensor(tensor):
            check_dense(f"state[{name!r}]", tensor)


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the experts of all ranks.  Ranks may have one more than others, which collectives can't."""
    import torch.distributed as dist

    counts = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([len(tensor)], device=tensor.device), group=group)
    sizes = [int(count) for count in counts]
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
