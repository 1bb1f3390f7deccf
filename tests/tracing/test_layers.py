"""Names of layers in traces and in ranges of profilers."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm import nn
from moecomm.base import layers
from moecomm.observe import tracing
from moecomm.observe.tracing import reading
from moecomm.rounds.spans import CALLS

from . import traces

SIZES: dict[str, Any] = {"hidden": 64, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 8}


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> traces.Ranges:
    found = traces.Ranges()
    monkeypatch.setattr(tracing, "nvtx_ranges", lambda: found)
    return found


def layer_of(**settings: Any) -> nn.ExpertParallel:
    return nn.ExpertParallel("self", **SIZES, backend="host", **settings)


def layers_of(folder: Path) -> dict[str, str | None]:
    """The layer of each span of a round."""
    [file] = reading.read([folder])
    spans = [span for span in file.spans if span.track == CALLS and " round " in span.name]
    return {span.name: span.args.get("layer") for span in spans}


def test_rounds_in_a_layer_have_its_name_and_others_have_none(tmp_path: Path, ranges: traces.Ranges) -> None:
    with moecomm.trace(tmp_path), moecomm.Buffer("self", **traces.SIZES) as buffer:
        with moecomm.layer("layers.0"):
            traces.make_rounds(buffer, 1)
            with pytest.raises(moecomm.BadInput), moecomm.layer("layers.0.inner"):
                buffer.dispatch(None, None)
            with moecomm.layer("layers.0.mtp"):
                traces.make_rounds(buffer, 1)
        traces.make_rounds(buffer, 1)
    assert layers_of(tmp_path) == {
        "dispatch round 1": "layers.0",
        "combine round 2": "layers.0",
        "dispatch round 3": "layers.0.mtp",
        "combine round 4": "layers.0.mtp",
        "dispatch round 5": None,
        "combine round 6": None,
    }
    assert [name for name in ranges.seen if " round " in name] == [
        *("moecomm:dispatch round 1, layers.0", "moecomm:combine round 2, layers.0"),
        *("moecomm:dispatch round 3, layers.0.mtp", "moecomm:combine round 4, layers.0.mtp"),
        *("moecomm:dispatch round 5", "moecomm:combine round 6"),
    ]
    assert ranges.open == []
    [file] = reading.read([tmp_path])
    calls = [span.args.get("layer") for span in file.spans if span.name in ("dispatch", "combine")]
    assert calls == ["layers.0", "layers.0", None, "layers.0.mtp", "layers.0.mtp", None, None]


@pytest.mark.parametrize("grads", [False, True])
def test_layers_of_a_model_have_the_names_of_their_modules(grads: bool, tmp_path: Path, ranges: traces.Ranges) -> None:
    model = torch.nn.Sequential(layer_of(), torch.nn.Identity(), layer_of(seed=1))
    x = torch.randn(5, 64, requires_grad=grads)
    with moecomm.trace(tmp_path, model=model), torch.set_grad_enabled(grads):
        out = model(x)
        if grads:
            out.sum().backward()
    assert list(layers_of(tmp_path).values()) == ["0", "0", "2", "2"] + [None] * 4 * grads
    assert any(name == "moecomm:dispatch round 3, 2" for name in ranges.seen)
    assert ranges.open == []
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert layers.current() == ""


def test_a_model_that_is_one_layer_has_a_name_and_a_failed_pass_leaves_none(tmp_path: Path) -> None:
    model = layer_of()
    with moecomm.trace(tmp_path, model=model):
        with pytest.raises(moecomm.BadInput):
            model(torch.zeros(5, 63))
        assert layers.current() == ""
        model(torch.zeros(5, 64))
    assert set(layers_of(tmp_path).values()) == {"layer"}


def test_threads_have_layers_of_their_own() -> None:
    seen = []
    with moecomm.layer("here"):
        thread = threading.Thread(target=lambda: seen.append(layers.current()))
        thread.start()
        thread.join()
        assert layers.current() == "here"
    assert seen == [""]


def test_a_trace_that_begins_in_a_layer_leaves_the_outer_name(tmp_path: Path) -> None:
    with ExitStack() as traced:

        class Traced(nn.ExpertParallel):
            def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                traced.enter_context(moecomm.trace(tmp_path, model=self))
                return super().forward(x)

        model = Traced("self", **SIZES, backend="host")
        model.register_forward_hook(lambda *_: None)  # so that torch looks for hooks after the pass
        with moecomm.layer("outer"):
            model(torch.zeros(5, 64))
            assert layers.current() == "outer"


def test_a_compiled_model_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(layer_of())
    model.compile()
    with pytest.raises(moecomm.BadInput, match="model"), moecomm.trace(tmp_path, model=model):
        pytest.fail("it began")
