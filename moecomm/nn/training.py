"""Experts beside torch's training: DistributedDataParallel, optimizers' states, and clipping by the norm of all ranks.

torch takes a parameter for the same on every rank.  Experts are not, so hooks of torch tell the two apart.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moecomm.base.validation import check_flag, check_real
from moecomm.errors import BadInput
from moecomm.nn.shard import ExpertShard, is_dtensor
from moecomm.ranks.rendezvous import ProcessGroup

_AVERAGED_OVER = "averaged_over"  # attribute of experts in a DistributedDataParallel: its number of ranks
_lock = threading.Lock()
_experts: WeakSet[torch.nn.Module] = WeakSet()  # modules whose other experts are on other ranks
# Optimizers that have made a step: the number of their groups then, and whether those have experts.
_seen: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = WeakKeyDictionary()


def watch(experts: torch.nn.Module, shard: ExpertShard) -> None:
    """Have wrappers, optimizers and clipping know experts of which other ranks have others.

    Called again when a module has new parameters.
    """
    if shard.ranks == 1:
        return
    with _lock:
        _experts.add(experts)
    _install()
    ranks = vars(experts).get(_AVERAGED_OVER, 1)
    for param in experts.parameters(recurse=False):
        if not param.requires_grad or is_dtensor(param):
            continue
        if _mark not in (param._post_accumulate_grad_hooks or {}).values():
            param.register_post_accumulate_grad_hook(_mark)  # type: ignore[no-untyped-call]
        if ranks > 1 and not any(isinstance(hook, _Average) for hook in (param._backward_hooks or {}).values()):
            param.register_hook(_Average(ranks))  # type: ignore[no-untyped-call]


class _Average(NamedTuple):
    """Gradient hook of experts that divides by the number of ranks, as DistributedDataParallel does elsewhere.

    The gradient of an expert is a sum over the tokens of all ranks.
    """

    ranks: int

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / self.ranks


class _ShardGradient(torch.Tensor):
    """A gradient of experts: a plain tensor, but one that torch.nn.utils.clip_grad_norm_ can't take for replicated."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linalg.vector_norm or func is torch._foreach_norm:  # get_total_norm() calls one of them
            raise BadInput(
                "gradients",
                "those of this rank's experts alone, whose norm differs from rank to rank",
                "moecomm.nn.clip_grad_norm_(model, max_norm) in place of torch's; grad.norm() is the norm of one rank",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _mark(param: torch.Tensor) -> None:
    if param.grad is not None and type(param.grad) is torch.Tensor:
        param.grad = param.grad.as_subclass(_ShardGradient)


@cache
def _install() -> None:
    """Register the hooks with torch, once a process."""
    register_module_module_registration_hook(_on_module)
    register_module_parameter_registration_hook(_on_parameter)
    register_optimizer_step_pre_hook(_on_step)


def expert_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a model that differ from rank to rank: those of Experts over several ranks.

    For `fully_shard(model, ignored_params=set(...))`.  Their gradients are sums over the tokens of all ranks.  Experts
    of one rank, as of a layer over the group "self", are not among them.

    Raises:
        BadInput: `model` is no module.
    """
    modules = [module for _, module, shard in _experts_of(model) if shard.group is None or shard.ranks > 1]
    return [param for module in modules for param in module.parameters(recurse=False)]


def _experts_of(model: Any) -> list[tuple[str, torch.nn.Module, ExpertShard]]:
    if not isinstance(model, torch.nn.Module):
        raise BadInput("model", type(model).__name__, "a torch module")
    found = []
    for name, module in model.named_modules():
        shard = vars(module).get("shard")
        if isinstance(shard, ExpertShard):
            found.append((name, module, shard))
    return found


def _on_parameter(module: torch.nn.Module, name: str, param: Any) -> None:
    """Refuse DTensors over ranks that own other experts, as fully_shard() and distribute_module() make them."""
    if is_dtensor(param) and isinstance(shard := vars(module).get("shard"), ExpertShard):
        what_to_do = "fully_shard(model, ignored_params=set(moecomm.nn.expert_parameters(model)))"
        _refuse_sharding(shard, f"experts.{name}", param.device_mesh.mesh.flatten().tolist(), what_to_do)


def _refuse_sharding(shard: ExpertShard, name: str, ranks: list[int], what_to_do: str) -> None:
    if shard.is_mixed_by(ranks):
        got = "weights that are shared with ranks that own other experts"
        raise BadInput(name, got, f"weights of this rank alone: {what_to_do}")


def _on_module(parent: torch.nn.Module, name: str, child: Any) -> None:
    """Keep experts apart in a model that a wrapper of torch takes."""
    if isinstance(parent, DistributedDataParallel) and name == "module":
        _leave_out(parent, child)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # an import of it takes long
    if fsdp is not None and isinstance(parent, fsdp.FullyShardedDataParallel) and name == "_fsdp_wrapped_module":
        for prefix, experts, shard in _experts_of(child):
            own = set(experts._parameters.values())
            if not own or not own <= parent._ignored_params:
                ranks = dist.get_process_group_ranks(parent.process_group)
                what_to_do = "FullyShardedDataParallel(ignored_states=set(moecomm.nn.expert_parameters(model)))"
                _refuse_sharding(shard, prefix or "experts", ranks, what_to_do)


def _leave_out(ddp: DistributedDataParallel, model: torch.nn.Module) -> None:
    """Leave experts out of what a DistributedDataParallel, under construction, will broadcast and reduce."""
    ranks = dist.get_process_group_ranks(ddp.process_group)
    owners = _owners()
    for name, param in model.named_parameters(remove_duplicate=False):
        experts = owners.get(id(param))
        if experts is None or name in ddp.parameters_to_ignore or not experts.shard.is_mixed_by(ranks):
            continue
        if sorted(experts.shard.global_ranks) != sorted(ranks):
            raise BadInput(
                name,
                f"experts of a group of {experts.shard.ranks} ranks in a DistributedDataParallel of {len(ranks)}",
                "the same ranks; or name the experts in the model's _ddp_params_and_buffers_to_ignore, and reduce "
                "their gradients over the ranks that own the same experts",
            )
        ddp.parameters_to_ignore.update((name, f".{name}"))  # as it builds the names of the outermost module's own
        ddp._module_parameters = [other for other in ddp._module_parameters if other is not param]
        setattr(experts, _AVERAGED_OVER, len(ranks))
        watch(experts, experts.shard)


def _owners() -> dict[int, Any]:
    """Return the module of each parameter of experts, by the parameter's id()."""
    with _lock:
        modules = list(_experts)
    return {id(param): module for module in modules for param in module.parameters(recurse=False)}


@torch.compiler.disable  # type: ignore[untyped-decorator] # torch has a graph break there as well
def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Have the states of experts saved and loaded as their weights are, from the first step of an optimizer."""
    groups = len(optimizer.param_groups)
    if _seen.get(optimizer, (0, False))[0] != groups:
        has_experts = any(_shards_of(optimizer))
        if has_experts and not _seen.get(optimizer, (0, False))[1]:
            _attach(optimizer)
        _seen[optimizer] = (groups, has_experts)
    if _seen[optimizer][1]:
        for param in _params_of(optimizer):
            if isinstance(param.grad, _ShardGradient):  # a compiled step takes plain tensors alone
                param.grad = _plain(param.grad)


def _attach(optimizer: torch.optim.Optimizer) -> None:
    owners = _owners()
    for experts in dict.fromkeys(owners[id(param)] for param in _params_of(optimizer) if id(param) in owners):
        experts.warn_if_broadcast()
    of_all = zip(_params_of(optimizer), _shards_of(optimizer), strict=True)
    owned = [(param, shard) for param, shard in of_all if shard is not None]
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        _refuse_sharding(
            owned[0][1],
            "params",
            dist.get_process_group_ranks(optimizer.process_group),
            "give experts an optimizer that is not sharded",
        )
    for param, shard in owned:
        if param in optimizer.state:  # loaded before the first step
            optimizer.state[param] = _unpacked(shard, param, optimizer.state[param])
    optimizer.register_state_dict_post_hook(_pack_state)
    optimizer.register_load_state_dict_pre_hook(_unpack_state)


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _shards_of(optimizer: torch.optim.Optimizer) -> list[ExpertShard | None]:
    """Return the shard of each parameter; None of those that are not of experts, or that FSDP2 shards as well."""
    owners = _owners()
    of_each = [None if is_dtensor(param) else owners.get(id(param)) for param in _params_of(optimizer)]
    return [None if module is None else module.shard for module in of_each]


def _pack_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    saved = dict(state["state"])
    for number, param, shard in _numbered(optimizer, state):
        if number in saved:
            like = (param.ndim, len(param))
            saved[number] = {
                name: shard.pack(value) if isinstance(value, torch.Tensor) and _is_like(value, like) else value
                for name, value in saved[number].items()
            }
    return {**state, "state": saved}


def _unpack_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    loaded = dict(state["state"])
    for number, param, shard in _numbered(optimizer, state):
        if number in loaded:
            loaded[number] = _unpacked(shard, param, loaded[number])
    return {**state, "state": loaded}


def _numbered(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> list[tuple[int, torch.Tensor, ExpertShard]]:
    """Return number, in a state dict, and shard of each parameter of experts."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of_all = zip(numbers, _params_of(optimizer), _shards_of(optimizer), strict=False)  # torch refuses other lengths
    return [(number, param, shard) for number, param, shard in of_all if shard is not None]


def _unpacked(shard: ExpertShard, param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: shard.unpack(f"optimizer state {name}", value)
        if isinstance(value, torch.Tensor) and (is_dtensor(value) or value.ndim == param.ndim)
        else value
        for name, value in state.items()
    }


def _is_like(value: torch.Tensor, like: tuple[int, int]) -> bool:
    """Return whether a state has an entry for each expert, as moments do, and not one for all, as the step."""
    return (value.ndim, len(value) if value.ndim else 0) == like


@torch.no_grad()
def clip_grad_norm_(
    model: torch.nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip gradients by the norm over the experts of all ranks, which is the same on every rank.  Collective.

    torch.nn.utils.clip_grad_norm_ sees the experts of this rank alone: ranks then scale the gradients of the gate
    differently, and their gates drift apart.

    Gradients of parameters other than experts are the same on every rank, or DTensors: call this after they have been
    reduced.

    Args:
        model: with Experts, as nn.ExpertParallel has them; DistributedDataParallel and FSDP2 may wrap it.
        max_norm: 0 or more.
        norm_type: p of the norm, above 0; may be inf.
        error_if_nonfinite: a norm that is not finite is an error, and nothing is clipped.

    Returns:
        The norm before, 0-dimensional.

    Raises:
        BadInput: `model` is no module; numbers out of range; with `error_if_nonfinite`, gradients that are not finite.
    """
    check_real("max_norm", max_norm, 0, float("inf"))
    check_real("norm_type", norm_type, 2.0**-20, float("inf"))
    check_flag("error_if_nonfinite", error_if_nonfinite)
    shards: dict[int, ExpertShard] = {}  # one of each group
    groups: dict[int, int] = {}  # group of each parameter of experts; 0: of other parameters
    for _, module, shard in _experts_of(model):
        if shard.ranks > 1:
            shards.setdefault(_number_of(shard), shard)
            groups.update((id(param), _number_of(shard)) for param in module.parameters(recurse=False))
    together: defaultdict[tuple[int, Any], list[torch.nn.Parameter]] = defaultdict(list)  # by group and DeviceMesh
    norms: dict[int, list[torch.Tensor]] = {group: [] for group in (0, *shards)}
    device = next((param.device for param in model.parameters()), None)
    for param in model.parameters():
        if param.grad is not None:
            mesh = param.grad.device_mesh if is_dtensor(param.grad) else None  # type: ignore[attr-defined]
            together[groups.get(id(param), 0), mesh].append(param)
    for (group, mesh), params in together.items():
        norm = get_total_norm([_plain(param.grad) for param in params], norm_type)
        norm = norm if mesh is None else norm.full_tensor()  # type: ignore[attr-defined]
        norms[group].append(norm.to(device, torch.promote_types(norm.dtype, torch.float32)))
    total = _norm_of(norms[0], norm_type, device)
    for group, shard in shards.items():  # in the order of the model, which is the same on every rank
        of_all = _over_ranks(_norm_of(norms[group], norm_type, device), norm_type, shard)
        total = _norm_of([total, of_all], norm_type, device)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise BadInput("gradients", f"a norm of {float(total)}", "finite gradients on every rank")
    for params in together.values():
        clip_grads_with_norm_(params, max_norm, total)
    return total


def _plain(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.as_subclass(torch.Tensor) if isinstance(gradient, _ShardGradient) else gradient


def _number_of(shard: ExpertShard) -> int:
    """Return a number that shards of one group share, not 0."""
    group = shard.group
    return id(group.process_group if isinstance(group, ProcessGroup) else group)


def _norm_of(norms: list[torch.Tensor], norm_type: float, device: torch.device | None) -> torch.Tensor:
    if not norms:
        return torch.zeros((), device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def _over_ranks(norm: torch.Tensor, norm_type: float, shard: ExpertShard) -> torch.Tensor:
    """Return the norm over the ranks of a group from that of each."""
    group = shard.group
    assert group is not None
    if isinstance(group, ProcessGroup):
        every = [torch.empty_like(norm) for _ in range(group.ranks)]
        dist.all_gather(every, norm, group=group.process_group)
    else:
        data = group.all_gather(norm.double().cpu().numpy().tobytes())
        every = [torch.frombuffer(bytearray(value), dtype=torch.float64)[0].to(norm) for value in data]
    return _norm_of(every, norm_type, norm.device)
