"""The plugin of SGLang: moecomm is deep_ep where none is installed, or where it is asked to be."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moecomm.compat import deep_ep, nixl_ep
from moecomm.integrations import sglang
from tests.compat import oracle
from tests.compat.test_low_latency import check_arrival, check_nvfp4_arrival

from ..backends.conftest import all_ranks

INSTALLED = importlib.util.find_spec("sglang")


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    def ours() -> dict[str, ModuleType]:
        return {name: m for name, m in sys.modules.items() if name.split(".")[0] in ("deep_ep", "nixl_ep", "sglang")}

    before = ours()
    for name in before:
        del sys.modules[name]
    yield
    for name in ours():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize(
    ("wanted", "there", "taken"),
    [("", False, True), ("", True, False), ("always", True, True), ("never", False, False)],
)
def test_deep_ep_is_moecomm_where_the_place_is_free_or_asked_for(
    monkeypatch: pytest.MonkeyPatch, wanted: str, there: bool, taken: bool
) -> None:
    if wanted:
        monkeypatch.setenv("MOECOMM_SGLANG", wanted)
    other, other_nixl = ModuleType("deep_ep"), ModuleType("nixl_ep")
    if there:
        sys.modules |= {"deep_ep": other, "nixl_ep": other_nixl}
    for _ in range(2):
        sglang.register()
    assert sys.modules.get("deep_ep") is (deep_ep if taken else other if there else None)
    assert sys.modules.get("nixl_ep") is (nixl_ep if taken else other_nixl if there else None)
    if taken:
        from deep_ep import Buffer, Config, ElasticBuffer  # what its dispatchers import

        assert (Buffer, Config, ElasticBuffer) == (deep_ep.Buffer, deep_ep.Config, deep_ep.ElasticBuffer)
        from nixl_ep import Buffer as Nixl
        from nixl_ep import topk_idx_t

        assert (Nixl, topk_idx_t) == (nixl_ep.Buffer, torch.int64)


def test_a_dispatcher_that_was_first_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    sys.modules["sglang.srt.layers.moe.token_dispatcher.deepep"] = ModuleType("deepep")
    sglang.register()
    assert "before plugins" in caplog.text and "deep_ep" not in sys.modules


@pytest.mark.parametrize("output", ["bf16", "fp8", "ue8m0", "nvfp4"])
@pytest.mark.parametrize("hook", [False, True])
def test_low_latency_as_its_dispatcher_calls_it(output: str, hook: bool) -> None:
    """The output dtypes that it asks for, as _DeepEPDispatcherImplLowLatency writes the calls."""
    sglang.register()
    from deep_ep import Buffer

    case = oracle.random_case(2, ranks=3, hidden=1024, most=12)
    factor = torch.tensor([37.0]).expand(case.local_experts)  # input_global_scale: the same for each local expert
    packed = output == "ue8m0"
    options: dict[str, Any] = {"use_fp8": output in ("fp8", "ue8m0")}
    if options["use_fp8"]:
        options |= {"round_scale": packed, "use_ue8m0": packed}
    if output == "nvfp4":
        options |= {"use_nvfp4": True, "x_global_scale": factor}

    def body(group: Any) -> None:
        buffer = Buffer(group, low_latency_mode=True)
        rank = buffer.rank
        ids, weights = case.topk_idx[rank], case.topk_weights[rank]
        hidden, masked_m, handle, event, wait = buffer.low_latency_dispatch(
            case.x[rank], ids, 12, case.num_experts, async_finish=not hook, return_recv_hook=hook, **options
        )
        wait() if hook else event.current_stream_wait()
        if output == "nvfp4":
            y = check_nvfp4_arrival(case, rank, hidden, masked_m, handle, factor)
        else:
            check_arrival(case, rank, hidden, masked_m, handle, (options["use_fp8"], packed, packed))
            rows = (hidden[0] if options["use_fp8"] else hidden).float()
            y = rows.bfloat16()
        combined, event, wait = buffer.low_latency_combine(
            x=y, topk_idx=ids, topk_weights=weights, handle=handle, async_finish=not hook, return_recv_hook=hook
        )
        wait() if hook else event.current_stream_wait()
        if output in ("bf16", "nvfp4"):
            total = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True) * case.x[rank].float()
            torch.testing.assert_close(combined.float(), total, rtol=2**-8, atol=1e-5)

    all_ranks(3, body)


def test_sglang_finds_the_plugin() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]\nmoecomm = "moecomm.integrations.sglang:register"' in text


def test_its_dispatcher_calls_what_there_is() -> None:
    """Every attribute that it takes of deep_ep's Buffer, in its source."""
    if INSTALLED is None or not INSTALLED.submodule_search_locations:
        pytest.skip("needs sglang, installed; its source is read")
    import re

    folder = Path(next(iter(INSTALLED.submodule_search_locations))) / "srt" / "layers" / "moe" / "token_dispatcher"
    text = (folder / "deepep.py").read_text()
    assert "from deep_ep import Buffer, Config" in text
    used = set(re.findall(r"\b(?:Buffer|buffer)\.([a-z]\w*)", text))
    assert {"dispatch", "combine", "low_latency_dispatch", "low_latency_combine", "get_dispatch_layout"} <= used
    instance = {"group_size", "low_latency_mode"}  # set by the constructor
    assert {name for name in used - instance if not hasattr(deep_ep.Buffer, name)} == set()
    text = (folder / "deepep_v2.py").read_text()
    assert "from deep_ep import ElasticBuffer" in text


def test_its_dispatcher_calls_what_there_is_of_nixl_ep() -> None:
    """Every attribute that it takes of nixl_ep's Buffer, in its source, but for one in a method that nothing calls."""
    if INSTALLED is None or not INSTALLED.submodule_search_locations:
        pytest.skip("needs sglang, installed; its source is read")
    import re

    folder = Path(next(iter(INSTALLED.submodule_search_locations)))
    file = folder / "srt" / "layers" / "moe" / "token_dispatcher" / "nixl.py"
    used = set(re.findall(r"\b(?:Buffer|buffer)\.([a-z]\w*)", file.read_text()))
    assert {"dispatch", "combine", "connect_ranks", "query_mask_buffer", "set_tcp_store_group"} <= used
    assert {name for name in used - {"group_size"} if not hasattr(nixl_ep.Buffer, name)} == {"clean_buffer"}
    assert not any("NixlEPBuffer.clean_buffer" in path.read_text() for path in folder.rglob("*.py"))


def test_its_dispatcher_is_not_reached_by_hooks() -> None:
    """The imports of its dispatchers decide whose Buffers they use; a hook around their choice comes later.

    Once it makes dispatchers of other packages, moecomm can come in by that: then moecomm.integrations.doors is out of
    date.
    """
    import ast

    if INSTALLED is None or not INSTALLED.submodule_search_locations:
        pytest.skip("needs sglang, installed; its source is read")
    folder = Path(next(iter(INSTALLED.submodule_search_locations))) / "srt"
    registry = (folder / "plugins" / "hook_registry.py").read_text()
    assert "class HookRegistry" in registry and "AROUND" in registry
    layer = ast.parse((folder / "layers" / "moe" / "fused_moe_triton" / "layer.py").read_text())
    (choice,) = [node for node in layer.body if getattr(node, "name", "") == "create_moe_dispatcher"]
    assert "is_deepep()" in ast.unparse(choice) and "is_customized" not in ast.unparse(choice)
    dispatcher = ast.parse((folder / "layers" / "moe" / "token_dispatcher" / "deepep.py").read_text())
    imports = [node for node in dispatcher.body if isinstance(node, ast.Try)]
    assert any("from deep_ep import Buffer, Config" in ast.unparse(node) for node in imports)
