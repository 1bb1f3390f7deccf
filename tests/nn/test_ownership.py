"""Experts of one's own, and parametrized and pruned ones, over several ranks, against float64 on one rank."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

import moecomm
from moecomm.base.experts import experts_of
from moecomm.nn import ExpertParallel, clip_grad_norm_, expert_parameters, gather_state, mark_experts

from ..backends.conftest import all_ranks
from .test_checkpoints import FLAT
from .test_training import HIDDEN, SIZES, TOKENS, WRAPS, tokens_of, train

EXPERTS, BOUND = 4, 0.2


class OwnExperts(torch.nn.Module):
    """Experts of one's own over ops.dispatch: linear ones in a dict by number, then scales `[E/R, H]`."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.buffer = group, None
        place = (0, 1) if group == "self" else (group.rank(), group.size())
        numbers = experts_of(place[0], EXPERTS, place[1])
        self.linear, self.scales = torch.nn.ModuleDict(), torch.nn.Module()
        for number in numbers:
            torch.manual_seed(number)
            self.linear[str(number)] = torch.nn.Linear(HIDDEN, HIDDEN)
        self.scales.weight = torch.nn.Parameter(torch.stack([torch.full((HIDDEN,), 1.0 + e) for e in numbers]))
        self.scales.register_buffer("numbers", torch.tensor(list(numbers)))
        for own in (self.linear, self.scales):
            assert mark_experts(own, group, num_experts=EXPERTS) is own

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnExperts:
        for shared in (self.group, self.buffer):
            memo[id(shared)] = shared
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def forward(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        if self.buffer is None:
            sizes = {name: SIZES[name] for name in ("hidden", "topk", "max_tokens", "backend", "device")}
            self.buffer = moecomm.nn.shared_buffer(self.group, **sizes, num_experts=EXPERTS, dtype=torch.float32)
        routed = moecomm.ops.dispatch(self.buffer, x, topk_idx, topk_weights)
        counts = routed.tokens_per_expert.tolist()
        *groups, unused = routed.x.split([*counts, len(routed.x) - sum(counts)])
        rows = [e(t) * s for e, t, s in zip(self.linear.values(), groups, self.scales.weight, strict=True)]
        return moecomm.ops.combine(torch.cat([*rows, unused]), routed.handle)

    def apply(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Return one expert's rows, on one rank."""
        return self.linear[str(expert)](x) * self.scales.weight[expert]


class Adapter(torch.nn.Module):
    """LoRA of stacked weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        experts, rows, columns = weight.shape
        self.down = torch.nn.Parameter(torch.full((experts, 2, columns), 0.1))
        self.up = torch.nn.Parameter(torch.full((experts, rows, 2), 0.1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def adapted(layer: ExpertParallel) -> None:
    for name in ("w13", "w2"):
        parametrize.register_parametrization(layer.experts, name, Adapter(getattr(layer.experts, name)))


def normed(layer: ExpertParallel) -> None:
    parametrizations.weight_norm(layer.experts, "w13")


def normed_by_hooks(layer: ExpertParallel) -> None:
    torch.nn.utils.weight_norm(layer.experts, "w2")


def pruned(layer: ExpertParallel) -> None:
    numbers = torch.tensor(list(layer.experts.shard.experts))
    mask = torch.arange(layer.experts.w13.shape[1]) % EXPERTS != numbers[:, None]
    prune.custom_from_mask(layer.experts, "w13", mask[:, :, None].expand_as(layer.experts.w13))


CHANGES: dict[str, Callable[[ExpertParallel], None]] = {
    "adapted": adapted,
    "normed": normed,
    "normed by hooks": normed_by_hooks,
    "pruned": pruned,
}
NOT_COPIED = ("normed by hooks", "pruned")  # torch can't copy such modules


class Model(torch.nn.Module):
    def __init__(self, group: Any, kind: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(HIDDEN, HIDDEN)])
        self.scores = torch.nn.Parameter(torch.tensor([0.3, -0.2]))
        if kind == "own":
            self.layer = OwnExperts(group)
        else:
            self.layer = ExpertParallel(group, **SIZES, num_experts=EXPERTS, gate=None, seed=seed)
            CHANGES[kind](self.layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        topk_idx = x[:, :EXPERTS].topk(2).indices
        x = self.blocks[0](x)
        return x + self.layer(x, topk_idx, self.scores.sigmoid().expand(len(x), 2))


class Reference(Model):
    """All experts in float64, without moecomm's operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        topk_idx = x[:, :EXPERTS].topk(2).indices
        x = self.blocks[0](x.double())
        out = x
        for expert in range(EXPERTS):
            weights = (self.scores.sigmoid() * (topk_idx == expert)).sum(1, keepdim=True)
            out = out + weights * self.rows_of(expert, x)
        return out

    def rows_of(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, OwnExperts):
            return self.layer.apply(expert, x)
        experts = self.layer.experts
        for hook in experts._forward_pre_hooks.values():
            hook(experts, None)
        gate, up = (x @ experts.w13[expert].T).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up) @ experts.w2[expert].T


def whole_of(model: torch.nn.Module, group: Any) -> dict[str, torch.Tensor]:
    state = gather_state(model.state_dict(), group)
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def grouped(model: torch.nn.Module) -> torch.optim.Optimizer:
    own = set(expert_parameters(model))
    groups = [{"params": [p for p in model.parameters() if (p in own) == owned]} for owned in (False, True)]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.3, momentum=0.5)


def _train(rank: int, group: Any, wrap: str) -> None:
    every = torch.cat([tokens_of(other) for other in range(group.size())])
    for kind in ("own", *CHANGES):
        one = Reference("self", kind).double()
        want = train(one, lambda: torch.nn.utils.clip_grad_norm_(one.parameters(), BOUND), every)  # noqa: B023
        assert all(norm > BOUND for _, norm in want), "clipping matters"
        for copied in (False, True)[: 1 if kind in NOT_COPIED else 2]:
            model = copy.deepcopy(Model(group, kind)) if copied else Model(group, kind)
            if rank:
                model.scores.data.zero_()  # rank 0's come with the wrapper, or by hand
            if wrap == "by hand" or wrap == "fsdp":
                dist.broadcast(model.scores.data, 0, group=group)
            wrapped, reduce = WRAPS[wrap](model, group)
            norms = train(wrapped, lambda: (reduce(), clip_grad_norm_(wrapped, BOUND))[1], tokens_of(rank))  # noqa: B023
            torch.testing.assert_close([n for _, n in norms], [n for _, n in want], rtol=1e-4, atol=1e-5, msg=kind)
            whole = whole_of(model, group)
            assert sorted(whole) == sorted(one.state_dict())
            for name, value in one.state_dict().items():
                torch.testing.assert_close(whole[name], value.to(whole[name].dtype), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("wrap", ["by hand", "ddp", "fsdp"])
def test_training_is_that_of_float64_on_one_rank(wrap: str, ranks: Any) -> None:
    ranks.run(2, _train, wrap)


def stepped(group: Any, kind: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a step by gradients that depend on the weights alone."""
    model = Model(group, kind, seed)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + seed / 4)
    optimizer = grouped(model)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    return model, optimizer


def _save(rank: int, group: Any, folder: str) -> None:
    for kind in ("own", *CHANGES):
        weights, moments = states.get_state_dict(*stepped(group, kind, 1), options=FLAT)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{kind}")


def _load(rank: int, group: Any, folder: str) -> None:
    for kind in ("own", *CHANGES):
        model, optimizer = Model(group, kind, 2), None
        optimizer = grouped(model)
        weights, moments = states.get_state_dict(model, optimizer, options=FLAT)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{kind}")
        states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT)
        want, stepped_once = stepped(group, kind, 1)
        for name, param in want.named_parameters():
            mine = model.get_parameter(name)
            assert torch.equal(mine, param), (kind, name)
            moment = stepped_once.state[param]["momentum_buffer"]
            assert torch.equal(optimizer.state[mine]["momentum_buffer"], moment), (kind, name)
        # The state of all experts, in which each rank finds its own; a state of the optimizer names no experts.
        whole = gather_state(want.state_dict(), group)
        one = stepped("self", kind, 1)[0].state_dict()
        assert sorted(whole) == sorted(one)
        assert all(torch.equal(whole[name], one[name]) for name in one)
        for assign in (False, True):
            again = Model(group, kind, 2)
            again.load_state_dict({name: value.clone() for name, value in one.items()}, assign=assign)
            for name, param in want.named_parameters():
                assert torch.equal(again.get_parameter(name), param), (kind, name)


def test_checkpoints_have_every_expert_for_any_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, _save, str(tmp_path))
    for number in (2, 4, 1):
        ranks.run(number, _load, str(tmp_path))


def _refused(rank: int, group: Any) -> None:
    x = tokens_of(rank)
    mine = experts_of(rank, EXPERTS, group.size())
    for unnamed, name in (
        (torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in mine), "0.weight"),
        (
            torch.nn.ModuleDict({"0": torch.nn.Linear(8, 8), "1": torch.nn.Linear(8, 8), "2": torch.nn.Linear(8, 8)}),
            "0",
        ),
        (torch.nn.Linear(8, 3, bias=False), "weight"),
        (torch.nn.BatchNorm1d(2), "num_batches_tracked"),
    ):
        with pytest.raises(moecomm.BadInput, match=rf"module: got {name}.*want .*2 experts .*torch\.nn\.ModuleDict"):
            mark_experts(unnamed, group, num_experts=EXPERTS)
    layer = ExpertParallel(group, **SIZES, num_experts=EXPERTS)
    for again in (layer, layer.experts):
        with pytest.raises(moecomm.BadInput, match="marked already"):
            mark_experts(again, group, num_experts=EXPERTS)
    with pytest.raises(moecomm.BadInput, match="num_experts"):
        mark_experts(torch.nn.Linear(8, 2), group, num_experts=1)

    # States that could not say whose experts they have.
    unstacked = Model(group, "adapted")
    unstacked.layer.experts.parametrizations.w13[0].step = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(moecomm.Unsupported, match=r"w13\.0\.step of shape \(1,\): give it an entry for each"):
        unstacked.state_dict()

    # Wrappers that take some of the experts, or all.
    named = Model(group, "adapted")
    named._ddp_params_and_buffers_to_ignore = ["layer.experts.parametrizations.w13.original"]
    with pytest.raises(moecomm.BadInput, match="names some"):
        DistributedDataParallel(named)
    model = Model(group, "own")
    delayed = [("layer.scales.weight", model.layer.scales.weight)]
    with pytest.raises(moecomm.BadInput, match="delay_all_reduce_named_params"):
        DistributedDataParallel(model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model.scores)

    # FSDP2 goes past torch's hooks in modules of others: the first use of the gradients says so.
    mesh = init_device_mesh("cpu", (group.size(),))
    for take in (lambda m: clip_grad_norm_(m, 1.0), lambda m: grouped(m).step()):
        sharded = fully_shard(Model(group, "adapted"), mesh=mesh)
        with pytest.raises(moecomm.BadInput, match=r"weights of this rank alone: fully_shard.*ignored_params"):
            take(sharded)
    with pytest.raises(moecomm.Unsupported, match="leave them out of fully_shard"):
        sharded.state_dict()

    # torch's norm, which sees the experts of one rank; also of adapters that come late, and in copies.
    for kind in ("own", "adapted"):
        for each in (Model(group, kind), copy.deepcopy(Model(group, kind)), Model(group, kind).to("meta")):
            if each.scores.is_meta:
                each.to_empty(device="cpu")
                each.load_state_dict(Model(group, kind).state_dict())
            if kind == "own":
                parametrizations.weight_norm(next(iter(each.layer.linear.values())))
            each(x).square().mean().backward()
            with pytest.raises(moecomm.BadInput, match=r"want moecomm\.nn\.clip_grad_norm_\(model, max_norm\)"):
                torch.nn.utils.clip_grad_norm_(expert_parameters(each)[-1], 1.0)
            assert len(expert_parameters(each)) == sum(p.grad is not None for p in expert_parameters(each))
    dist.barrier(group)


def test_what_would_mix_or_lose_experts_is_refused(ranks: Any) -> None:
    ranks.run(2, _refused)


def test_threads_load_their_experts_from_states() -> None:
    def body(group: Any) -> dict[str, Any]:
        def made(seed: int) -> torch.nn.Module:
            torch.manual_seed(seed + group.rank)
            numbers = experts_of(group.rank, 5, 2)
            module = torch.nn.ModuleDict({"stacked": torch.nn.Linear(3, len(numbers))})
            module["by_number"] = torch.nn.ModuleDict({str(number): torch.nn.Linear(3, 3) for number in numbers})
            return mark_experts(module, group, num_experts=5)

        module, again = made(1), made(10)
        again.load_state_dict(module.state_dict())
        assert all(torch.equal(*pair) for pair in zip(module.parameters(), again.parameters(), strict=True))
        return module.state_dict()

    first, second = all_ranks(2, body)
    assert [name for name in second if name.startswith("by")] == [
        f"by_number.{number}.{name}" for number in (3, 4) for name in ("weight", "bias")
    ]
    module = mark_experts(
        torch.nn.ModuleDict({"stacked": torch.nn.Linear(3, 2)}), moecomm.local_ranks(2)[1], num_experts=5
    )
    with pytest.raises(moecomm.BadInput, match="experts 0 to 2 of 5; want experts 3 to 4"):
        module.load_state_dict(first)


def test_adapters_around_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PEFT's `target_parameters` makes them."""

    class BaseTunerLayer(torch.nn.Module):
        def __init__(self, base_layer: torch.nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

    monkeypatch.setitem(sys.modules, "peft.tuners.tuners_utils", SimpleNamespace(BaseTunerLayer=BaseTunerLayer))
    layer = ExpertParallel("self", **SIZES, num_experts=2)
    BaseTunerLayer(layer)
    with pytest.raises(moecomm.Unsupported, match=r"BaseTunerLayer of PEFT .*register_parametrization"):
        BaseTunerLayer(layer.experts)
    x = torch.randn(TOKENS, HIDDEN)
    assert layer(x).shape == x.shape
