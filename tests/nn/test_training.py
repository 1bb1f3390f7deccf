"""Training over several ranks by DDP, FSDP2 or by hand, with clipping, against one rank with all tokens and experts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, distribute_module, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import moecomm
from moecomm.fused.weights import expert_weights, first_weights
from moecomm.nn import ExpertParallel, clip_grad_norm_, expert_parameters, gather_state

from ..backends.conftest import all_ranks

HIDDEN, TOKENS, STEPS = 16, 6, 3
SIZES: dict[str, Any] = {
    "hidden": HIDDEN,
    "intermediate": 8,
    "topk": 2,
    "max_tokens": 4 * TOKENS,
    "backend": "host",
    "device": "cpu",
}


class Model(torch.nn.Module):
    """Layers inside blocks inside a list, which registers them before they have any."""

    def __init__(self, group: Any, experts: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList()
        generator = torch.Generator().manual_seed(3)
        for seed in (1, 2):
            block = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN))
            for param in block.parameters():
                param.data.copy_(torch.randn(param.shape, generator=generator) / 4)
            self.blocks.append(block)
            block.append(ExpertParallel(group, **SIZES, num_experts=experts, seed=seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def tokens_of(rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(10 + rank))


def train(model: torch.nn.Module, step: Callable[[], Any], x: torch.Tensor) -> list[list[float]]:
    """Return losses and norms of some steps.  `step` reduces gradients, if the model does not, and clips them."""
    own = set(expert_parameters(model))
    groups = [{"params": [p for p in model.parameters() if (p in own) == owned]} for owned in (False, True)]
    optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.5, foreach=True)  # as on GPUs
    found = []
    for _ in range(STEPS):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        norm = step()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item(), norm.item()])
    return found


def averaged(model: torch.nn.Module, group: Any, replicas: bool) -> None:
    """Divide the sums of experts; average other gradients, if they are replicas that nobody reduces."""
    own = set(expert_parameters(model))
    for param in model.parameters():
        if param in own or replicas:
            assert param.grad is not None
            if param not in own:
                dist.all_reduce(param.grad, group=group)
            param.grad /= group.size()


def by_hand(model: torch.nn.Module, group: Any) -> tuple[torch.nn.Module, Callable[[], None]]:
    return model, lambda: averaged(model, group, True)


def ddp(model: torch.nn.Module, group: Any) -> tuple[torch.nn.Module, Callable[[], None]]:
    return DistributedDataParallel(model), lambda: None


def ddp_of_named(model: torch.nn.Module, group: Any) -> tuple[torch.nn.Module, Callable[[], None]]:
    """Gradients of experts that the caller leaves out are divided by the caller."""
    own = set(expert_parameters(model))
    model._ddp_params_and_buffers_to_ignore = [name for name, param in model.named_parameters() if param in own]
    return DistributedDataParallel(model), lambda: averaged(model, group, False)


def fsdp(model: torch.nn.Module, group: Any) -> tuple[torch.nn.Module, Callable[[], None]]:
    own = set(expert_parameters(model))
    mesh = init_device_mesh("cpu", (group.size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=own)
    return fully_shard(model, mesh=mesh, ignored_params=own), lambda: averaged(model, group, False)


WRAPS = {"by hand": by_hand, "ddp": ddp, "ddp of named": ddp_of_named, "fsdp": fsdp}


def whole_of(model: torch.nn.Module, group: Any) -> dict[str, list[Any]]:
    state = gather_state(model.state_dict(), group)
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    return {name: value.tolist() for name, value in whole.items()}


def _train(rank: int, group: Any, experts: int, wrap: str) -> tuple[list[list[float]], dict[str, list[Any]]]:
    model = Model(group, experts)
    wrapped, reduce = WRAPS[wrap](model, group)

    def step() -> torch.Tensor:
        reduce()
        return clip_grad_norm_(wrapped, 0.5)

    losses, norms = torch.tensor(train(wrapped, step, tokens_of(rank))).T.contiguous()
    dist.all_reduce(losses, group=group)
    return torch.stack([losses / group.size(), norms], dim=1).tolist(), whole_of(model, group)


@pytest.mark.parametrize(
    ("wrap", "experts", "number"),
    [("by hand", 5, 4), ("ddp", 8, 2), ("ddp of named", 8, 2), ("fsdp", 8, 2)],
)
def test_losses_norms_and_weights_are_those_of_one_rank(wrap: str, experts: int, number: int, ranks: Any) -> None:
    one = Model("self", experts)
    x = torch.cat([tokens_of(rank) for rank in range(number)])
    want = train(one, lambda: torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5), x)
    assert all(norm > 0.5 for _, norm in want), "clipping matters"
    results = ranks.run(number, _train, experts, wrap)
    for losses, weights in results:
        assert weights == results[0][1], "gates do not drift"
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-4, atol=1e-5)
        for name, value in one.state_dict().items():
            torch.testing.assert_close(torch.tensor(weights[name]), value, rtol=1e-4, atol=1e-5)


def _norms(rank: int, group: Any) -> list[list[float]]:
    """Norms of gradients that are the weights; the experts of rank 0 have none."""
    model, found = Model(group, 5), []
    for kind in KINDS:
        for param in model.parameters():
            param.grad = param.detach().clone()
        if rank == 0:
            for param in expert_parameters(model):
                param.grad = None
        norm = clip_grad_norm_(model, 1.0, kind)
        clipped = clip_grad_norm_(model, 1e6, kind)
        found.append([norm.item(), clipped.item()])
    return found


KINDS = (1.0, 2.0, 3.5, float("inf"))


def test_norms_are_those_of_one_rank(ranks: Any) -> None:
    one, want = Model("self", 5), []
    for kind in KINDS:
        for param in one.parameters():
            param.grad = param.detach().clone()
        for block in one.blocks:
            for param in block[1].experts.parameters():
                param.grad[:2] = 0  # experts of rank 0 of 4
        want.append([torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0, kind).item(), 1.0])
    for found in ranks.run(4, _norms):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-5, atol=0)


def test_threads_clip_by_the_norm_of_all() -> None:
    one = Model("self", 5)
    for param in one.parameters():
        param.grad = param.detach().clone()
    want = torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)

    def body(group: Any) -> torch.Tensor:
        model = Model(group, 5)
        for param in model.parameters():
            param.grad = param.detach().clone()
        return clip_grad_norm_(model, 1.0)

    for found in all_ranks(3, body):
        torch.testing.assert_close(found, want)


def test_norms_that_are_not_finite_are_told() -> None:
    model = Model("self", 5)
    assert clip_grad_norm_(model, 1.0) == 0
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.inf)
    with pytest.raises(moecomm.BadInput, match="gradients: got a norm of inf"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert all(torch.isposinf(param.grad).all() for param in model.parameters() if param.grad is not None)


def _refused(rank: int, group: Any) -> None:
    x = tokens_of(rank)
    model = Model(group, 8)
    before = [param.detach().clone() for param in model.parameters()]

    # FSDP2 and DTensors over ranks that have other experts.
    mesh = init_device_mesh("cpu", (group.size(),))
    for wrap in (
        lambda: fully_shard(Model(group, 8), mesh=mesh),
        lambda: fully_shard(Model(group, 8).blocks[0], mesh=mesh),
        lambda: distribute_module(Model(group, 8), mesh),
    ):
        with pytest.raises(
            moecomm.BadInput, match=r"experts\.w13: got weights that are shared .* want .*ignored_params="
        ):
            wrap()
    for kept in (False, True):
        with pytest.raises(moecomm.BadInput, match=r"blocks\.0\.1\.experts: got weights .*ignored_states="):
            FullyShardedDataParallel(Model(group, 8), device_id=torch.device("cpu"), use_orig_params=kept)
    left = Model(group, 8)
    FullyShardedDataParallel(left, device_id=torch.device("cpu"), ignored_states=set(expert_parameters(left)))

    # DDP over other ranks than the experts'; experts of one rank are replicas.
    alone = [dist.new_group([other]) for other in range(group.size())][rank]
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    with pytest.raises(moecomm.BadInput, match=r"blocks\.0\.1\.experts\.w13: got experts of a group of 4 .* of 2"):
        DistributedDataParallel(model, process_group=pair)
    DistributedDataParallel(model, process_group=alone)
    replicas = DistributedDataParallel(Model(alone, 8))
    assert expert_parameters(replicas) == [] and len(expert_parameters(model)) == 4
    assert replicas.parameters_to_ignore == set()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))

    # An optimizer that keeps each parameter on one rank.
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes long, and warns

    zero = Model(group, 8)
    optimizer = ZeroRedundancyOptimizer(zero.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(moecomm.BadInput, match="params: got weights that are shared"):
        optimizer.step()

    # FSDP2 over ranks that have the same experts is fine; its shards have no state that torch.checkpoint could take.
    ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    twice = Model(ranks["experts"], 8)
    want = twice(x).detach()
    for block in twice.blocks:
        fully_shard(block[1].experts, mesh=ranks["copies"])
    assert torch.equal(twice(x), want)
    with pytest.raises(moecomm.Unsupported, match="state dict of experts whose weights are DTensors"):
        twice.state_dict()

    # torch's norm, which sees the experts of one rank; in copies, and after a move from the meta device, too.
    made = Model(group, 8).to("meta").to_empty(device="cpu")
    made.load_state_dict(model.state_dict())
    for each in (model, copy.deepcopy(model), made):
        for _ in range(2):  # gradients may be sums
            each(x).square().mean().backward()
        for take in (
            lambda: torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0),  # noqa: B023
            lambda: torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0, foreach=False),  # noqa: B023
            lambda: torch.nn.utils.get_total_norm([p.grad for p in each.parameters()]),  # noqa: B023
        ):
            with pytest.raises(moecomm.BadInput, match=r"want moecomm\.nn\.clip_grad_norm_\(model, max_norm\)"):
                take()
        assert expert_parameters(each)[0].grad.norm() >= 0
    dist.barrier(group)


def test_what_would_mix_experts_or_let_gates_drift_is_refused(ranks: Any) -> None:
    ranks.run(4, _refused)


def _broadcast(rank: int, group: Any) -> list[list[str]]:
    """What is said where scripts without DDP start alike: nothing, if they leave experts out."""
    said = []
    for kept, dtype, by_step in (
        (False, torch.float32, False),
        (False, torch.bfloat16, True),
        (True, torch.float32, False),
    ):
        model = ExpertParallel(group, **SIZES, num_experts=4, dtype=dtype)
        experts = set(expert_parameters(model)) if kept else set()
        with torch.no_grad():
            for param in model.parameters():
                if param not in experts:
                    dist.broadcast(param, 0, group)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                if by_step:  # as with a Buffer that is given, which no forward pass opens
                    torch.optim.SGD(model.parameters(), lr=0.0).step()
                else:
                    model(tokens_of(rank))
        said.append([str(each.message) for each in caught if "broadcast" in str(each.message)])
    return said


def test_experts_that_were_broadcast_by_hand_are_warned_of(ranks: Any) -> None:
    on_0, on_1 = ranks.run(2, _broadcast)
    assert on_0 == [[], [], []]
    text = (
        "experts 2 to 3 have the weights of rank 0's: broadcast all parameters but those of "
        "moecomm.nn.expert_parameters(model)"
    )
    assert on_1 == [[text], [text], []]


@pytest.mark.parametrize(("hidden", "intermediate"), [(4, 4), (12, 4), (16, 24)])
def test_the_first_weights_are_those_that_are_drawn_in_full(hidden: int, intermediate: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        w13, _ = expert_weights(3, hidden, intermediate, seed=7, dtype=dtype)
        assert torch.equal(first_weights(3, hidden, seed=7, dtype=dtype), w13.flatten()[:8])


def _wrapped_in_turn(rank: int, group: Any) -> None:
    """Gradients of experts are sums; a DistributedDataParallel divides them once, while it is there."""
    x = tokens_of(rank)

    def sums(model: torch.nn.Module, called: torch.nn.Module | None = None) -> list[torch.Tensor]:
        model.zero_grad()
        (called or model)(x).square().mean().backward()
        return [param.grad.clone() for param in expert_parameters(model)]

    def assert_sums(got: list[torch.Tensor], divisor: int) -> None:
        for gradient, whole in zip(got, want, strict=True):
            torch.testing.assert_close(gradient, whole / divisor)

    model = Model(group, 8)
    want = sums(model)
    wrapper, second = DistributedDataParallel(model), DistributedDataParallel(model)
    assert_sums(sums(model, wrapper), 2)
    assert_sums(sums(model, DistributedDataParallel(second)), 2)
    assert_sums(sums(copy.deepcopy(model)), 1)
    for copied in (copy.deepcopy(wrapper), copy.copy(wrapper)):
        assert_sums(sums(copied.module, copied), 2)
        del copied  # torch frees a wrapper with its last reference
    model.load_state_dict(gather_state(model.state_dict(), group), assign=True)
    assert_sums(sums(model), 2)
    del wrapper, second
    assert_sums(sums(model), 1)

    frozen, composed = Model(group, 8), Model(group, 8)
    for param in expert_parameters(frozen):
        param.requires_grad_(False)
    wrapper = DistributedDataParallel(frozen)
    for param in expert_parameters(frozen):
        param.requires_grad_(True)
    assert_sums(sums(frozen, wrapper), 2)
    replicate(composed)
    assert_sums(sums(composed), 2)


def test_gradients_are_divided_once_and_while_there_is_a_wrapper(ranks: Any) -> None:
    ranks.run(2, _wrapped_in_turn)


def _trained_alone(rank: int, group: Any, names: tuple[str, ...]) -> None:
    """Nothing but experts is trained, as in ESFT, so the wrapper has nothing to reduce."""
    x = tokens_of(rank)
    every = torch.cat([tokens_of(other) for other in range(group.size())])
    one = Model("self", 8)
    for param in (param for name, param in one.named_parameters() if not name.endswith(names)):
        param.requires_grad_(False)
    want = train(one, lambda: torch.nn.utils.clip_grad_norm_(one.parameters(), 0.05), every)
    options: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for kind in (*options, {"gradient_as_bucket_view": True}, None):
        model = Model(group, 8)
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith(names))
            if rank and param not in set(expert_parameters(model)):
                param.data.zero_()  # until rank 0's come
        wrapped = replicate(model) if kind is None else DistributedDataParallel(model, **kind)
        norms = [norm for _, norm in train(wrapped, lambda: clip_grad_norm_(model, 0.05), x)]  # noqa: B023
        torch.testing.assert_close(norms, [norm for _, norm in want], rtol=1e-4, atol=1e-5)
        for name, value in whole_of(model, group).items():
            torch.testing.assert_close(torch.tensor(value), one.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("names", [("w13", "w2"), ("w2",)])
def test_experts_may_be_all_that_is_trained(names: tuple[str, ...], ranks: Any) -> None:
    ranks.run(2, _trained_alone, names)


def _experts_alone(rank: int, group: Any) -> None:
    layer = ExpertParallel(group, **SIZES, num_experts=8, gate=None)
    x, topk_idx = tokens_of(rank), torch.tensor([[0, 7]]).expand(TOKENS, 2)
    layer(x, topk_idx).sum().backward()
    want = [param.grad / 2 for param in layer.parameters()]
    for wrapped in (DistributedDataParallel(layer), DistributedDataParallel(DistributedDataParallel(layer))):
        layer.zero_grad()
        wrapped(x, topk_idx).sum().backward()
        for param, gradient in zip(layer.parameters(), want, strict=True):
            torch.testing.assert_close(param.grad, gradient)


def test_a_layer_without_a_gate_may_be_wrapped(ranks: Any) -> None:
    ranks.run(2, _experts_alone)


def _scaled(rank: int, group: Any) -> None:
    """A rank whose experts overflow has all ranks leave out the step."""
    model = Model(group, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), ShardedGradScaler("cpu", process_group=group)
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(model(tokens_of(rank)).square().mean()).backward()
    if rank == 0:
        expert_parameters(model)[0].grad[0] = torch.inf
    scaler.unscale_(optimizer)
    clip_grad_norm_(model, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_sharded_scaler_keeps_ranks_together(ranks: Any) -> None:
    ranks.run(2, _scaled)


def _added(rank: int, group: Any) -> None:
    """Experts that an optimizer gets after its first step are saved like others."""
    model = Model(group, 8)
    own = set(expert_parameters(model))
    optimizer = torch.optim.SGD([param for param in model.parameters() if param not in own], lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    optimizer.add_param_group({"params": list(own)})
    optimizer.step()
    moments = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    assert sum(isinstance(moment, DTensor) for moment in moments) == len(own)


def test_experts_may_be_added_to_an_optimizer(ranks: Any) -> None:
    ranks.run(2, _added)


FORMS = ("plain", "foreach", "fused", "compiled")


@pytest.mark.parametrize("form", FORMS)
def test_optimizers_take_gradients_of_experts(form: str) -> None:
    """As they take plain gradients."""

    def updated(group: Any) -> list[torch.Tensor]:
        model = Model(group, 8)
        optimizer = torch.optim.AdamW(
            model.parameters(), foreach=form in ("foreach", "compiled"), fused=form == "fused"
        )
        sum(param.square().sum() for param in model.parameters()).backward()
        step = torch.compile(optimizer.step, backend="aot_eager") if form == "compiled" else optimizer.step
        step()
        return [param.detach() for param in model.parameters()]

    got, whole = updated(moecomm.local_ranks(2)[0]), updated("self")
    torch.compiler.reset()
    for mine, want in zip(got, whole, strict=True):
        torch.testing.assert_close(mine, want[: len(mine)], rtol=1e-6, atol=0)
