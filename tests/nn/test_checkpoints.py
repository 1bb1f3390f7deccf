"""State dicts of layers over several ranks: the right experts after save and load, or an error by name."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor

import moecomm
from moecomm.base.experts import experts_of
from moecomm.nn import ExpertParallel, Experts, gather_state, shard, shard_state

from ..backends.conftest import all_ranks

SIZES: dict[str, Any] = {"hidden": 8, "intermediate": 4, "topk": 2, "max_tokens": 8, "backend": "host", "device": "cpu"}
OTHER, SAVED = 2, 1  # seeds; an expert's weights depend on the seed and its number alone
FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)
ODD = 6  # experts, which 4 ranks share as 2, 2, 1, 1 and torch.chunk would as 2, 2, 2, 0


def model_of(group: Any, experts: int, seed: int) -> torch.nn.Module:
    return torch.nn.Sequential(ExpertParallel(group, **SIZES, num_experts=experts, seed=seed))


def stepped(group: Any, experts: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a step by gradients that depend on the weights alone."""
    model = model_of(group, experts, seed)
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    return model, optimizer


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor that this rank has."""
    moments = [value for param in model.parameters() for _, value in sorted(optimizer.state[param].items())]
    return [param.detach() for param in model.parameters()] + moments


def same(
    got: tuple[torch.nn.Module, torch.optim.Optimizer], want: tuple[torch.nn.Module, torch.optim.Optimizer]
) -> bool:
    pairs = zip(tensors_of(*got), tensors_of(*want), strict=True)
    return all(type(a) is type(b) and torch.equal(a, b) for a, b in pairs)


def experts_equal(model: torch.nn.Module, group: Any, experts: int) -> bool:
    pairs = zip(model.parameters(), model_of(group, experts, SAVED).parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _save(rank: int, group: Any, experts: int, path: str) -> None:
    model, optimizer = states.get_state_dict(*stepped(group, experts, SAVED))
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def _load(rank: int, group: Any, experts: int, path: str) -> bool:
    trained = model_of(group, experts, OTHER)
    trained = (trained, torch.optim.Adam(trained.parameters()))
    model, optimizer = states.get_state_dict(*trained)
    loaded = {"model": model, "optimizer": optimizer}
    dcp.load(loaded, checkpoint_id=path)
    states.set_state_dict(*trained, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    return same(trained, stepped(group, experts, SAVED))


@pytest.mark.parametrize(("experts", "saving", "loading"), [(8, 2, (4, 1)), (ODD, 4, (2, 4)), (ODD, 1, (4,))])
def test_torch_checkpoints_have_every_expert_for_any_number_of_ranks(
    experts: int, saving: int, loading: tuple[int, ...], ranks: Any, tmp_path: Path
) -> None:
    ranks.run(saving, _save, experts, str(tmp_path / "saved"))
    for number in loading:
        assert ranks.run(number, _load, experts, str(tmp_path / "saved")) == [True] * number


def grouped(group: Any, experts: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with other parameters, and an optimizer with groups as docs/training.md has them."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), model_of(group, experts, seed))
    own = set(moecomm.nn.expert_parameters(model))
    groups = [{"params": [p for p in model.parameters() if (p in own) == owned]} for owned in (False, True)]
    return model, torch.optim.AdamW([group for group in groups if group["params"]])


def _save_groups(rank: int, group: Any, experts: int, path: str) -> None:
    model, optimizer = grouped(group, experts, SAVED)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    weights, moments = states.get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)


def _load_groups(rank: int, group: Any, experts: int, path: str) -> bool:
    model, optimizer = grouped(group, experts, OTHER)
    weights, moments = states.get_state_dict(model, optimizer, options=FLAT)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT)
    want, stepped_once = grouped(group, experts, SAVED)
    for param in want.parameters():
        param.grad = param.detach().clone()
    stepped_once.step()
    return same((model, optimizer), (want, stepped_once))


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2)])
def test_a_checkpoint_of_several_ranks_loads_on_one_with_the_optimizer_of_the_page(
    saving: int, loading: int, ranks: Any, tmp_path: Path
) -> None:
    """One rank has no group of experts, so states by parameter, not by group, go both ways."""
    ranks.run(saving, _save_groups, ODD, str(tmp_path / "saved"))
    assert ranks.run(loading, _load_groups, ODD, str(tmp_path / "saved")) == [True] * loading


def _called_with_a_state(rank: int, group: Any) -> list[str]:
    layer = ExpertParallel(group, **SIZES, num_experts=ODD)
    x = torch.randn(4, 8)
    said = []
    for opened in (False, True):
        for state in (layer.state_dict(), gather_state(layer.state_dict(), group)):
            with pytest.raises(moecomm.BadInput) as error:
                torch.func.functional_call(layer, state, x)
            said.append(f"{error.value.argument} {error.value.want} {opened}")
        out = torch.func.functional_call(layer, dict(layer.named_parameters()), x)  # opens the Buffer
        assert torch.equal(out, layer(x))
    return said


def test_a_functional_call_with_the_experts_of_all_ranks_says_what_to_pass(ranks: Any) -> None:
    for found in ranks.run(2, _called_with_a_state):
        assert len(found) == 4
        assert all(said.startswith("experts.w13 this rank's 3: ") and "named_parameters" in said for said in found)


def _rank_0_saves(rank: int, group: Any, experts: int, folder: str) -> list[str]:
    model, optimizer = stepped(group, experts, SAVED)
    mine = model.state_dict()
    torch.save((mine, optimizer.state_dict()), f"{folder}/{rank}")
    dist.barrier(group)
    loaded = torch.load(f"{folder}/0", weights_only=True)
    other, unstepped = model_of(group, experts, OTHER), None
    unstepped = torch.optim.Adam(other.parameters())
    said = []
    for take in (
        lambda: other.load_state_dict(loaded[0]),
        lambda: optimizer.load_state_dict(loaded[1]),
        lambda: (unstepped.load_state_dict(loaded[1]), unstepped.step()),
        lambda: shard_state(loaded[0], rank, group.size()),
    ):
        try:
            take()
            said.append("")
        except moecomm.BadInput as error:
            said.append(str(error))
    # A file of each rank's own is right, as is the state itself.
    for own in (torch.load(f"{folder}/{rank}", weights_only=True), (mine, optimizer.state_dict())):
        again = model_of(group, experts, OTHER)
        again.load_state_dict(own[0])
        reloaded = torch.optim.Adam(again.parameters())
        reloaded.load_state_dict(own[1])
        for param in again.parameters():
            param.grad = None
        reloaded.step()  # without gradients nothing changes
        assert same((again, reloaded), (model, optimizer))
    return said


def test_members_of_enumerations_that_python_pickles_by_getattr_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Python 3.11.4; torch.load would refuse the state of experts that ranks do not share evenly."""
    formats = dcp.metadata._MEM_FORMAT_ENCODING
    by_name = lambda self, _: (getattr, (type(self), self.name))  # noqa: E731
    monkeypatch.setattr(formats, "__reduce_ex__", by_name)
    shard._allow_loading()
    written = io.BytesIO()
    torch.save(list(formats), written)
    written.seek(0)
    assert torch.load(written, weights_only=True) == list(formats)


@pytest.mark.parametrize(("experts", "number"), [(8, 2), (ODD, 4)])
def test_what_rank_0_saved_of_its_experts_is_refused_elsewhere(
    experts: int, number: int, ranks: Any, tmp_path: Path
) -> None:
    found = ranks.run(number, _rank_0_saves, experts, str(tmp_path))
    for rank, (model, stepped_optimizer, unstepped, sharded) in enumerate(found):
        assert sharded.startswith("state: got ")
        for said in (model, stepped_optimizer, unstepped):
            if rank == 0:
                assert said == ""
                continue
            mine, of_0 = experts_of(rank, experts, number), experts_of(0, experts, number)
            assert f"a state of experts 0 to {of_0.stop - 1} of {experts}; want experts {mine.start}" in said
            assert "which this rank owns" in said
    if experts == ODD:
        return
    one = model_of(None, experts, OTHER)
    with pytest.raises(moecomm.BadInput, match=f"want experts 0 to {experts - 1}, which this rank owns"):
        one.load_state_dict(torch.load(tmp_path / "0", weights_only=True)[0])


def _whole_states(rank: int, group: Any, experts: int) -> list[bool]:
    want = model_of("self", experts, SAVED).state_dict()
    model, optimizer = stepped(group, experts, OTHER)
    model.load_state_dict(want)
    found = [experts_equal(model, group, experts)]
    assigned = model_of(group, experts, OTHER)
    assigned.load_state_dict({name: value.clone() for name, value in want.items()}, assign=True)
    found.append(experts_equal(assigned, group, experts))
    found.append(all(p.untyped_storage().nbytes() == p.nbytes for p in assigned.parameters()))
    whole = gather_state(model.state_dict(), group)
    found.append(list(whole) == list(want) and all(torch.equal(whole[name], want[name]) for name in want))
    if experts % group.size() == 0:
        options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        whole, moments = states.get_state_dict(model, optimizer, options=options)
        if rank == 0:
            found.append(all(torch.equal(whole[name], want[name]) for name in want))
        other = stepped(group, experts, SAVED + 7)
        states.set_state_dict(*other, model_state_dict=whole, optim_state_dict=moments, options=options)
        found.append(same(other, (model, optimizer)))
    return found


@pytest.mark.parametrize(("experts", "number"), [(8, 2), (ODD, 4)])
def test_a_state_of_all_experts_is_loaded_and_made(experts: int, number: int, ranks: Any) -> None:
    for found in ranks.run(number, _whole_states, experts):
        assert all(found), found


def _forms(rank: int, group: Any) -> None:
    model = model_of(group, 8, SAVED)
    state = model.state_dict()
    weight = state["0.experts.w13"]
    assert isinstance(weight, DTensor) and weight.shape == (8, 8, 8)
    assert weight.to_local().data_ptr() == model[0].experts.w13.data_ptr(), "no copy"
    assert model.state_dict(keep_vars=True)["0.experts.w13"] is model[0].experts.w13
    copied = copy.deepcopy(model)
    assert isinstance(copied.state_dict()["0.experts.w2"], DTensor)
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
    other = model_of(group, 8, OTHER)
    other.load_state_dict(local)
    assert experts_equal(other, group, 8)
    sharded = shard_state(gather_state(state, group), rank, group.size())
    for strict in (True, False):
        other.load_state_dict(sharded, strict=strict)
    with pytest.raises(moecomm.BadInput, match=r"0\.experts\.w13: got a state of 8 experts; want one of 12"):
        model_of(group, 12, OTHER).load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({**local, "0.experts.w2": torch.zeros(3, 8, 4)})
    for unpicklable in (model, model[0], model[0].experts):
        with pytest.raises(moecomm.BadInput, match=r"layer: got pickle or torch.save .* want its state_dict\(\)"):
            torch.save(unpicklable, io.BytesIO())
    assert copy.copy(model[0]).experts is model[0].experts
    sizes = {name: SIZES[name] for name in ("hidden", "topk", "max_tokens", "backend")}
    with moecomm.Buffer(group, **sizes, num_experts=8, dtype=torch.float32) as buffer:
        given = ExpertParallel(**SIZES, num_experts=8, buffer=buffer, seed=OTHER)
        given.load_state_dict(model[0].state_dict())
        assert isinstance(given.state_dict()["experts.w13"], DTensor)
        assert torch.equal(given.experts.w13, model[0].experts.w13)


def test_states_have_dtensors_over_processes_and_layers_are_not_pickled(ranks: Any) -> None:
    ranks.run(2, _forms)


def test_threads_and_experts_alone_say_which_experts_they_have() -> None:
    def body(group: Any) -> dict[str, Any]:
        layer = ExpertParallel(group, **SIZES, num_experts=7, seed=SAVED)
        state = layer.state_dict()
        again = ExpertParallel(group, **SIZES, num_experts=7, seed=OTHER)
        again.load_state_dict(state)
        assert torch.equal(again.experts.w13, layer.experts.w13)
        whole = ExpertParallel("self", **SIZES, num_experts=7, seed=SAVED).state_dict()
        again = ExpertParallel(group, **SIZES, num_experts=7, seed=OTHER)
        again.load_state_dict(whole)
        assert torch.equal(again.experts.w2, layer.experts.w2)
        with pytest.raises(moecomm.BadInput, match="pickle"):
            torch.save(layer, io.BytesIO())
        return state

    states_of = all_ranks(3, body)
    layer = ExpertParallel(moecomm.local_ranks(3)[1], **SIZES, num_experts=7, seed=OTHER)
    with pytest.raises(moecomm.BadInput, match="experts 0 to 2 of 7; want experts 3 to 4, which this rank owns"):
        layer.load_state_dict(states_of[0])
    with pytest.raises(moecomm.BadInput, match="of one rank of several"):
        shard_state(states_of[0], 0, 3)

    first, second = Experts(range(2), 8, 4), Experts(range(2, 4), 8, 4)
    second.load_state_dict(copy.deepcopy(second.state_dict()))
    with pytest.raises(moecomm.BadInput, match="w13: got a state of experts 0 to 1; want experts 2 to 3"):
        second.load_state_dict(first.state_dict())
    Experts(range(1), 8, 4).load_state_dict(first.state_dict())
    with pytest.raises(moecomm.BadInput, match="extra state"):
        first.load_state_dict({**first.state_dict(), "_extra_state": 3})
    with pytest.raises(moecomm.BadInput, match="experts"):
        Experts(range(1, 3), 8, 4, num_experts=4, group=moecomm.local_ranks(2)[1])
    with pytest.raises(moecomm.BadInput, match="num_experts"):
        Experts(range(2), 8, 4, group="self")


@pytest.mark.parametrize(("experts", "number"), [(8, 3), (7, 3), (6, 4), (8, 2)])
def test_states_are_split_as_layers_are(experts: int, number: int) -> None:
    whole = ExpertParallel("self", **SIZES, num_experts=experts, seed=SAVED).state_dict()
    for rank, group in enumerate(moecomm.local_ranks(number)):
        layer = ExpertParallel(group, **SIZES, num_experts=experts, seed=SAVED)
        cut = shard_state(whole, rank, number)
        for name, param in layer.named_parameters():
            assert torch.equal(cut[name], param), name
        layer = ExpertParallel(group, **SIZES, num_experts=experts, seed=OTHER)
        layer.load_state_dict(cut)
        assert all(torch.equal(cut[name], param) for name, param in layer.named_parameters())


def test_a_layer_with_a_given_buffer_is_copied_and_not_pickled() -> None:
    sizes = {name: SIZES[name] for name in ("hidden", "topk", "max_tokens", "backend")}
    with moecomm.Buffer(**sizes, num_experts=4, dtype=torch.float32) as buffer:
        layer = ExpertParallel(**SIZES, num_experts=4, buffer=buffer)
        assert copy.deepcopy(layer).open() is buffer and copy.copy(layer).open() is buffer
        with pytest.raises(moecomm.BadInput, match=r"with a given Buffer.*want its state_dict\(\)"):
            torch.save(layer, io.BytesIO())
        with pytest.raises(moecomm.BadInput, match="with a given Buffer"):
            torch.save(torch.nn.Sequential(layer), io.BytesIO())
