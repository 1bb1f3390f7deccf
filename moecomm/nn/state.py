"""States of models with ExpertParallel layers: one rank's with all experts, cut into those of several, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from moecomm.core.integers import check_integer, is_integer
from moecomm.core.rendezvous import rendezvous
from moecomm.core.validation import check_dense
from moecomm.errors import BadInput

if TYPE_CHECKING:
    import torch.distributed as dist

SHARDED = ("experts.w13", "experts.w2")  # ends of the names of what is cut, along the experts


def is_sharded(name: str) -> bool:
    """Whether a tensor of that name has a part on every rank; the others are the same on all."""
    return any(name == end or name.endswith(f".{end}") for end in SHARDED)


def shard_state(state: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """The state of one rank, out of one with the weights of all experts.

    Args:
        state: a state_dict of a model, all of whose ExpertParallel layers have `[E, ...]` weights.
        rank: whose state.
        num_ranks: R, of the group.

    Returns:
        The same names; weights of experts are views of `[E/R, ...]`.

    Raises:
        BadInput: weights that can't be cut into R parts.
    """
    _check_state(state)
    check_integer("num_ranks", num_ranks, 1)
    if not is_integer(rank) or not 0 <= rank < num_ranks:
        raise BadInput("rank", repr(rank), f"0 to {num_ranks - 1}")
    cut = {}
    for name, tensor in state.items():
        if is_sharded(name):
            if tensor.ndim == 0 or tensor.shape[0] % num_ranks:
                raise BadInput(
                    "state", f"{tuple(tensor.shape)} in {name}", f"[E, ...], E a multiple of {num_ranks} ranks"
                )
            tensor = tensor.chunk(num_ranks)[rank]
        cut[name] = tensor
    return cut


def gather_state(
    state: Mapping[str, torch.Tensor], group: dist.ProcessGroup | str | None = None
) -> dict[str, torch.Tensor]:
    """The state with the weights of all experts, out of every rank's.  Collective.

    Args:
        state: this rank's state_dict.
        group: of the ExpertParallel layers, with a backend that moves the tensors' kind; "self": one rank; None:
            see Buffer.

    Returns:
        The same names; weights of experts are `[E, ...]`, on every rank.
    """
    _check_state(state)
    if group is None or isinstance(group, str):
        rendezvous(group)  # raises unless it is one rank
        return dict(state)
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        raise BadInput("group", type(group).__name__, "a torch.distributed ProcessGroup, or None")

    whole = {}
    for name in sorted(state):  # in one order on all ranks
        tensor = state[name].detach()
        if is_sharded(name):
            parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            tensor = torch.cat(parts)
        whole[name] = tensor
    return {name: whole[name] for name in state}


def _check_state(state: Any) -> None:
    """Raises BadInput unless it is tensors by name; what modules keep besides, as bytes, is left alone."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise BadInput("state", type(state).__name__, "tensors by name, as a state_dict has them")
    for name, tensor in state.items():
        if is_sharded(name):
            check_dense(f"state[{name!r}]", tensor)
