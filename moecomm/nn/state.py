"""State dicts of models with ExpertParallel layers: split one with all experts over ranks, and gather it again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from moecomm.base.experts import experts_of
from moecomm.base.validation import check_dense, check_integer, is_integer
from moecomm.errors import BadInput
from moecomm.nn.ownership import EXTRA_STATE
from moecomm.nn.shard import is_dtensor, is_packed, local_of
from moecomm.ranks.group import Group
from moecomm.ranks.rendezvous import rendezvous

if TYPE_CHECKING:
    import torch.distributed as dist

_EXTRA = re.compile(rf"(?:.*\.)?experts\.{EXTRA_STATE}")
# Tensors of nn.Experts, also where torch has parametrized or pruned them.
_SHARDED = re.compile(r"(?:.*\.)?experts\.(?:parametrizations\.)?w(?:13|2)(?:_bias)?(?:[._].*)?")


def is_sharded(name: str) -> bool:
    """Return whether a tensor of that name is sharded over ranks; other tensors are replicated."""
    return _SHARDED.fullmatch(name) is not None


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
        if _EXTRA.fullmatch(name) or is_packed(value) or (is_sharded(name) and is_dtensor(value)):
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
        group: the group of the layers, with a backend for the tensors' device; "self": one rank; None:
            see Buffer.

    Returns:
        The names of all ranks, on every rank; weights of experts are tensors `[E, ...]`, or a tensor for each expert by
        its number, see `mark_experts()`.  A layer of any number of ranks loads them.

    Raises:
        BadInput: another group; not a state_dict.
    """
    _check_state(state)
    state = {name: value for name, value in state.items() if not _EXTRA.fullmatch(name)}
    if group is None or isinstance(group, str):
        rendezvous(group)  # raises unless it is one rank
        return state
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        raise BadInput("group", type(group).__name__, "a torch.distributed ProcessGroup, or None")

    held = _descriptions(state, rendezvous(group))
    whole: dict[str, Any] = {name: state.get(name) for name in dict.fromkeys(chain(*held, state))}
    for name in sorted(whole):  # the same order of collectives on all ranks
        tensor = whole[name]
        holders = [rank for rank, names in enumerate(held) if name in names]
        if len(holders) == 1:  # an expert of one rank, by its number
            shape, dtype, device = held[holders[0]][name]
            made = torch.empty(shape, dtype=getattr(torch, dtype), device=device) if tensor is None else tensor.detach()
            tensor = made.contiguous()
            dist.broadcast(tensor, group=group, group_src=holders[0])
        elif is_packed(tensor) or (holders and is_sharded(name)):
            tensor = _gathered(local_of(name, tensor)[0] if is_dtensor(tensor) else tensor.detach(), group)
        whole[name] = tensor
    return whole


def _descriptions(state: Mapping[str, Any], group: Group) -> list[dict[str, Any]]:
    """Return shape, name of the dtype, and device of the tensors of each rank's state."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    mine = json.dumps({n: (list(v.shape), str(v.dtype)[len("torch.") :], v.device.type) for n, v in tensors.items()})
    longest = max(int.from_bytes(size, "little") for size in group.all_gather(len(mine).to_bytes(8, "little")))
    return [json.loads(text) for text in group.all_gather(mine.ljust(longest).encode())]


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
