"""Experts beside torch's training: DistributedDataParallel, optimizers' states, and clipping by the norm of all ranks.

torch takes a parameter for the same on every rank.  Experts are not, so hooks of torch tell the two apart.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
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

from moecomm.base.experts import experts_of
from moecomm.base.validation import MOST_SIZE, check_flag, check_integer, check_real
from moecomm.errors import BadInput, Unsupported
from moecomm.nn import ownership
from moecomm.nn.shard import ExpertShard, is_dtensor
from moecomm.ranks.rendezvous import ProcessGroup, rendezvous


@dataclass
class _Optimizer:
    """An optimizer at its last step."""

    groups: int = 0  # number of them
    has_experts: bool = False


_lock = threading.Lock()
# Optimizers that have made a step.
_optimizers: WeakKeyDictionary[torch.optim.Optimizer, _Optimizer] = WeakKeyDictionary()
_wrappers: WeakSet[DistributedDataParallel] = WeakSet()  # those that leave experts out


def mark_experts(module: torch.nn.Module, group: Any, *, num_experts: int) -> torch.nn.Module:
    """Mark a module as this rank's own experts, as nn.Experts is: other ranks have others.

    The mark holds for all parameters and buffers below the module, also for those that parametrizations or adapters add
    later, and for deep copies.  As long as it is there, DistributedDataParallel, `expert_parameters()`,
    `clip_grad_norm_()`, states of modules and optimizers, and `gather_state()` treat them as they treat nn.Experts.

    States name experts in two ways, between which a module may choose for each of its parts.  Tensors `[E/R, ...]` have
    an entry for each expert of this rank, and are DTensors `[E, ...]` in states.  In a torch.nn.ModuleDict whose keys
    are the numbers of this rank's experts, `str(expert)`, each tensor is of one expert, and states of ranks differ in
    names.

    Makes no communication.  Every rank marks its module, or none does.

    Args:
        module: of this rank's experts alone.
        group: the ranks that have the other experts, as the group of their Buffer.
        num_experts: E, of all ranks together.

    Returns:
        The module.

    Raises:
        BadInput: not a module; a part of it that is marked already; a parameter or buffer that has neither form, as in
            a torch.nn.ModuleList, whose names are the same on all ranks.
    """
    if not isinstance(module, torch.nn.Module):
        raise BadInput("module", type(module).__name__, "a torch module")
    place = rendezvous(group)
    check_integer("num_experts", num_experts, place.ranks, MOST_SIZE)
    shard = ExpertShard(experts_of(place.rank, num_experts, place.ranks), num_experts, place)
    if marked := ownership.marked_in(module):
        raise BadInput("module", f"experts that are marked already: {marked[0][0] or 'the module'}", "each marked once")
    if shard.ranks > 1 and (unnamed := ownership.first_unnamed(module, shard)):
        name, tensor = unnamed
        raise BadInput("module", f"{name} of shape {tuple(tensor.shape)}", shard.want_entry_each())
    mark(module, shard)
    if shard.ranks > 1:
        # A dict of modules is not called itself.  All of a rank's experts run in each pass, so the first will do.
        called = next(iter(module.values())) if isinstance(module, torch.nn.ModuleDict) else module
        called.register_forward_pre_hook(partial(_watch_again, module))
        watch(module)
    return module


def mark(module: torch.nn.Module, shard: ExpertShard) -> None:
    """Mark all below a module as experts of a shard, and have torch's wrappers ask for the mark."""
    _install()
    ownership.mark(module, shard)
    if shard.ranks > 1:
        vars(module)["_entry"] = _Entry(module)
    module.register_load_state_dict_post_hook(_watch_loaded)  # type: ignore[no-untyped-call]


class _Entry:
    """The entry of a module among those that are marked.  A deep copy of the module enters the copy."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.ref(module)
        ownership.enter(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Entry:
        module = self.module()
        assert module is not None
        copied: torch.nn.Module = memo[id(module)]
        entry = _Entry(copied)
        # The copy has no attribute yet, but torch's come first, so its parameters are there.
        _watch_parameters(copied, [memo[id(param)] for param in module.parameters() if id(param) in memo])
        return entry


def _watch_loaded(module: torch.nn.Module, _: Any) -> None:
    watch(module)  # parameters that were assigned, or moved from the meta device, are new


def _watch_again(marked: torch.nn.Module, called: torch.nn.Module, args: Any) -> None:
    """Forward hook for parameters that a module got since the last pass: by assignment, adapters or a deep copy."""
    if not torch.compiler.is_compiling():
        watch(marked)


def watch(module: torch.nn.Module) -> None:
    """Give the parameters of marked experts the hooks that they lack, also those that are frozen now."""
    shard = ownership.shard_of(module)
    if shard is not None and shard.ranks > 1:
        _watch_parameters(module, module.parameters())


def _watch_parameters(module: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]) -> None:
    is_averaged = _averaged_over(module) > 1
    for param in parameters:
        if not isinstance(param, torch.nn.Parameter) or is_dtensor(param) or not param.is_floating_point():
            continue
        lacks_mark = _mark_gradient not in (param._post_accumulate_grad_hooks or {}).values()
        lacks_average = is_averaged and not any(
            isinstance(hook, _Average) for hook in (param._backward_hooks or {}).values()
        )
        if not lacks_mark and not lacks_average:
            continue
        is_trained = param.requires_grad
        param.requires_grad_(True)  # torch takes hooks of such tensors alone, and keeps them
        if lacks_mark:
            param.register_post_accumulate_grad_hook(_mark_gradient)  # type: ignore[no-untyped-call]
        if lacks_average:
            param.register_hook(_Average(weakref.ref(module)))  # type: ignore[no-untyped-call]
        param.requires_grad_(is_trained)


class _Average(NamedTuple):
    """Gradient hook of experts that divides by the number of ranks, as DistributedDataParallel does elsewhere.

    The gradient of an expert is a sum over the tokens of all ranks.  It is divided while there is a wrapper that leaves
    the experts out, and not after.
    """

    module: weakref.ref[torch.nn.Module]  # with the mark

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        module = self.module()
        return gradient if module is None else gradient / _averaged_over(module)


def _averaged_over(module: torch.nn.Module) -> int:
    """Return the number of ranks of a wrapper that leaves these experts out; 1: there is none."""
    with _lock:
        wrappers = list(_wrappers)
    sizes = (dist.get_world_size(ddp.process_group) for ddp in wrappers if module in vars(ddp)["_left_out_experts"])
    return next(sizes, 1)


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


def _mark_gradient(param: torch.Tensor) -> None:
    if param.grad is not None and type(param.grad) is torch.Tensor:
        param.grad = param.grad.as_subclass(_ShardGradient)


@cache
def _install() -> None:
    """Register the hooks with torch, once a process."""
    register_module_module_registration_hook(_on_module)
    register_module_parameter_registration_hook(_on_parameter)
    register_optimizer_step_pre_hook(_on_step)


def expert_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a model that differ from rank to rank: those of experts over several ranks.

    These are all parameters below nn.Experts, as nn.ExpertParallel has them, and below modules of `mark_experts()`,
    parametrized ones and adapters among them.  For `fully_shard(model, ignored_params=set(...))`.  Their gradients are
    sums over the tokens of all ranks.  Experts of one rank, as of a layer over the group "self", are not among them.

    Raises:
        BadInput: `model` is no module.
    """
    marked = _experts_of(model)
    of_ranks = [module for _, module, shard in marked if shard.group is None or shard.ranks > 1]
    return list(dict.fromkeys(param for module in of_ranks for param in module.parameters()))


def _experts_of(model: Any) -> list[tuple[str, torch.nn.Module, ExpertShard]]:
    if not isinstance(model, torch.nn.Module):
        raise BadInput("model", type(model).__name__, "a torch module")
    return ownership.marked_in(model)


def _on_parameter(module: torch.nn.Module, name: str, param: Any) -> None:
    """Refuse DTensors over ranks that own other experts, as fully_shard() and distribute_module() make them."""
    if is_dtensor(param):
        for shard, path in ownership.marks_above(module):
            _refuse_dtensor(shard, f"experts.{path}{name}", param)


def _refuse_dtensor(shard: ExpertShard, name: str, param: Any) -> None:
    what_to_do = "fully_shard(model, ignored_params=set(moecomm.nn.expert_parameters(model)))"
    _refuse_sharding(shard, name, param.device_mesh.mesh.flatten().tolist(), what_to_do)


def _refuse_sharding(shard: ExpertShard, name: str, ranks: list[int], what_to_do: str) -> None:
    if shard.is_mixed_by(ranks):
        got = "weights that are shared with ranks that own other experts"
        raise BadInput(name, got, f"weights of this rank alone: {what_to_do}")


def _on_module(parent: torch.nn.Module, name: str, child: Any) -> None:
    """Keep experts apart in a model that a wrapper takes."""
    if isinstance(parent, DistributedDataParallel) and name == "module":
        _leave_out(parent, child)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # an import of it takes long
    if fsdp is not None and isinstance(parent, fsdp.FullyShardedDataParallel) and name == "_fsdp_wrapped_module":
        for prefix, experts, shard in _experts_of(child):
            own = set(experts.parameters())
            if not own or not own <= parent._ignored_params:
                ranks = dist.get_process_group_ranks(parent.process_group)
                what_to_do = "FullyShardedDataParallel(ignored_states=set(moecomm.nn.expert_parameters(model)))"
                _refuse_sharding(shard, prefix or "experts", ranks, what_to_do)
    peft = sys.modules.get("peft.tuners.tuners_utils")
    is_adapter = peft is not None and isinstance(parent, peft.BaseTunerLayer)
    if is_adapter and isinstance(child, torch.nn.Module) and ownership.shard_of(child) is not None:
        raise Unsupported(
            f"{type(parent).__name__} of PEFT around experts, whose adapters would be the same on all ranks: give w13 "
            "and w2 adapters [experts, ...] by torch.nn.utils.parametrize.register_parametrization()"
        )


def _leave_out(ddp: DistributedDataParallel, model: torch.nn.Module) -> None:
    """Leave experts out of what a DistributedDataParallel, under construction, will broadcast and reduce."""
    ranks = dist.get_process_group_ranks(ddp.process_group)
    of_all = ownership.owned_by_id()
    named = [(name, tensor, of_all[id(tensor)]) for name, tensor in ownership.tensors_of(model) if id(tensor) in of_all]
    owned = [(name, tensor, owner) for name, tensor, owner in named if owner.shard.is_mixed_by(ranks)]
    for tensor in ddp._delay_all_reduce_params:
        if (owner := of_all.get(id(tensor))) is not None:
            _refuse_sharding(owner.shard, "delay_all_reduce_named_params", ranks, "leave experts out of the list")
    by_caller: dict[torch.nn.Module, set[bool]] = {}  # whether the caller left out those that are trained
    for name, tensor, owner in owned:
        is_left_out = by_caller.setdefault(owner.module, set())
        if tensor.requires_grad:
            is_left_out.add(name in ddp.parameters_to_ignore)
            if len(is_left_out) == 2:
                raise BadInput(name, "experts of which _ddp_params_and_buffers_to_ignore names some", "all, or none")
    averaged = [module for module, is_left_out in by_caller.items() if True not in is_left_out]
    for name, _, owner in owned:
        if owner.module in averaged and sorted(owner.shard.global_ranks) != sorted(ranks):
            raise BadInput(
                name,
                f"experts of a group of {owner.shard.ranks} ranks in a DistributedDataParallel of {len(ranks)}",
                "the same ranks; or name the experts in the model's _ddp_params_and_buffers_to_ignore, and reduce "
                "their gradients over the ranks that own the same experts",
            )
    if not owned:
        return
    for name, _, _ in owned:
        ddp.parameters_to_ignore.update((name, f".{name}"))  # as it builds the names of the outermost module's own
    left_out = {id(tensor) for _, tensor, _ in owned}
    replicated = [param for param in ddp._module_parameters if id(param) not in left_out]
    ddp._module_parameters = replicated or [_nothing(owned[0][1].device)]
    vars(ddp)["_left_out_experts"] = averaged  # a deep copy has the copies of the modules
    ddp.__class__ = _leaving_out_experts(type(ddp))
    with _lock:
        _wrappers.add(ddp)
    for module in averaged:
        watch(module)


def _nothing(device: torch.device) -> torch.nn.Parameter:
    """Return a parameter without gradients, where torch wants one."""
    return torch.nn.Parameter(torch.zeros(1, device=device))


@cache
def _leaving_out_experts(base: type[DistributedDataParallel]) -> type[DistributedDataParallel]:
    """Return a wrapper's class with what experts need: a model may train nothing else, and copies divide as well."""
    if issubclass(base, _LeavesOutExperts):
        return base
    return type(base.__name__, (_LeavesOutExperts, base), {"__module__": base.__module__})


class _LeavesOutExperts(DistributedDataParallel):
    """A wrapper that may have nothing to reduce, and of which a deep copy divides gradients as well."""

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        parameters, expect_sparse_gradient = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        self._has_no_parameter = not parameters
        if self._has_no_parameter:  # torch's reducer crashes without one; one that gets no gradient keeps it idle
            return [_nothing(self.device)], [False]
        return parameters, expect_sparse_gradient

    def _build_debug_param_to_name_mapping(self, parameters: list[Any]) -> dict[int, str]:
        if self._has_no_parameter:
            return {0: "nothing"}
        names: dict[int, str] = super()._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        return names

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        with _lock:
            _wrappers.add(self)


@torch.compiler.disable  # type: ignore[untyped-decorator] # torch has a graph break there as well
def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Have the states of experts saved and loaded as their weights are, from the first step of an optimizer."""
    known = _optimizers.setdefault(optimizer, _Optimizer())
    if known.groups != len(optimizer.param_groups):
        known.groups = len(optimizer.param_groups)
        experts = _experts_among(optimizer)
        _check_first_step(optimizer, experts)
        if experts and not known.has_experts:
            known.has_experts = True
            _attach(optimizer)
    if known.has_experts:
        for param in _params_of(optimizer):
            if isinstance(param.grad, _ShardGradient):  # a compiled step takes plain tensors alone
                param.grad = _plain(param.grad)


def _check_first_step(optimizer: torch.optim.Optimizer, experts: dict[int, ownership.Owned]) -> None:
    """Warn of experts that were broadcast, and refuse those that a wrapper has sharded."""
    for module in dict.fromkeys(owner.module for owner in experts.values()):
        watch(module)
        warn = getattr(module, "warn_if_broadcast", None)  # of nn.Experts
        if callable(warn):
            warn()
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    sharding: Any = optimizer if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer) else None
    for param in _params_of(optimizer):
        if (owner := experts.get(id(param))) is None:
            continue
        if is_dtensor(param):
            _refuse_dtensor(owner.shard, "experts", param)
        if sharding is not None:
            ranks = dist.get_process_group_ranks(sharding.process_group)
            _refuse_sharding(owner.shard, "params", ranks, "give experts an optimizer that is not sharded")


def _attach(optimizer: torch.optim.Optimizer) -> None:
    stacked = _stacked_among(optimizer)
    for param in _params_of(optimizer):
        if id(param) in stacked and param in optimizer.state:  # loaded before the first step
            optimizer.state[param] = _unpacked(stacked[id(param)], param, optimizer.state[param])
    optimizer.register_state_dict_post_hook(_pack_state)
    optimizer.register_load_state_dict_pre_hook(_unpack_state)


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _experts_among(optimizer: torch.optim.Optimizer) -> dict[int, ownership.Owned]:
    """Return the parameters of experts, by id()."""
    owned = ownership.owned_by_id()
    return {id(param): owned[id(param)] for param in _params_of(optimizer) if id(param) in owned}


def _stacked_among(optimizer: torch.optim.Optimizer) -> dict[int, ExpertShard]:
    """Return the shards of parameters `[E/R, ...]`, by id(); not those that FSDP2 shards as well."""
    experts = _experts_among(optimizer)
    plain = [param for param in _params_of(optimizer) if id(param) in experts and not is_dtensor(param)]
    return {id(param): experts[id(param)].shard for param in plain if not experts[id(param)].is_numbered}


def _pack_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    saved = dict(state["state"])
    for number, param, shard in _numbered(optimizer, state):
        if number in saved:
            like = (param.ndim, len(param))
            saved[number] = {
                name: shard.pack(name, value) if isinstance(value, torch.Tensor) and _is_like(value, like) else value
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
    """Return number, in a state dict, and shard of each parameter `[E/R, ...]` of experts."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    stacked = _stacked_among(optimizer)
    of_all = zip(numbers, _params_of(optimizer), strict=False)  # torch refuses other lengths
    return [(number, param, stacked[id(param)]) for number, param in of_all if id(param) in stacked]


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
        model: with experts of nn.ExpertParallel or `mark_experts()`; DistributedDataParallel and FSDP2 may wrap it.
        max_norm: 0 or more.
        norm_type: p of the norm, above 0; may be inf.
        error_if_nonfinite: a norm that is not finite is an error, and nothing is clipped.

    Returns:
        The norm before, 0-dimensional.

    Raises:
        BadInput: `model` is no module; numbers out of range; experts that FSDP2 shards over ranks with other experts;
            with `error_if_nonfinite`, gradients that are not finite.
    """
    check_real("max_norm", max_norm, 0, float("inf"))
    check_real("norm_type", norm_type, 2.0**-20, float("inf"))
    check_flag("error_if_nonfinite", error_if_nonfinite)
    shards: dict[int, ExpertShard] = {}  # one of each group
    groups: dict[int, int] = {}  # group of each parameter of experts; 0: of other parameters
    for name, module, shard in _experts_of(model):
        if shard.ranks > 1:
            shards.setdefault(_number_of(shard), shard)
            for param in module.parameters():
                groups[id(param)] = _number_of(shard)
                if is_dtensor(param):
                    _refuse_dtensor(shard, name, param)
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
