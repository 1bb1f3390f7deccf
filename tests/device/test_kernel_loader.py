"""Both kinds of kernels are loaded alike: what the driver is asked for, in its order, with a driver that notes it."""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from moecomm.errors import Unsupported
from moecomm.gpu import cuda_driver, jit, linking, loader, plain_kernel

SPEC = jit.KernelSpec(op="dispatch", ranks=1, experts=1, topk=1, hidden=8, layout=0, type=0, idx_bytes=8, row_bytes=16)
PLAIN = plain_kernel.PlainKernel("fused/reduce", "reduce_layer", "LayerArgs", 32)


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_IMAGE = 200


class Driver:
    """Hands out numbers in place of handles; the GPU is of compute capability `capability`."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.given = {"cuDeviceGet": 70, "cuDevicePrimaryCtxRetain": 71, "cuModuleLoadData": 72}
        self.given |= {"cuModuleGetFunction": 73, "cuCtxGetCurrent": 74, "cuThreadExchangeStreamCaptureMode": "global"}
        self.capability, self.failing = capability, ""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments: Any) -> tuple[Any, ...]:
            if name == "cuDeviceGetAttribute":
                return Status.CUDA_SUCCESS, self.capability[arguments[0]]
            self.asked.append((name, *arguments))
            if name == self.failing:
                return (Status.CUDA_ERROR_INVALID_IMAGE,)
            return (Status.CUDA_SUCCESS, *([self.given[name]] if name in self.given else []))

        return function


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(cuda_driver, "driver", lambda: fake)
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(plain_kernel, "_functions", {})
    for module in (jit, plain_kernel):
        monkeypatch.setattr(module, "compile", lambda _, arch, *traced: arch.encode())
    return fake


def asked(entry: bytes, shared_bytes: int) -> list[tuple[Any, ...]]:
    return [
        ("cuInit", 0),
        ("cuDeviceGet", 3),
        ("cuDevicePrimaryCtxRetain", 70),
        ("cuCtxPushCurrent", 71),
        ("cuModuleLoadData", b"sm_90a"),
        ("cuModuleGetFunction", 72, entry),
        ("cuFuncSetAttribute", 73, "shared", shared_bytes),
        ("cuFuncLoad", 73),
        ("cuCtxPopCurrent",),
    ]


def test_a_kernel_of_rounds_is_loaded_once_a_device(driver: Driver) -> None:
    fields = jit.block_fields(SPEC)
    wanted = jit.Kernel(73, jit.block_threads(fields), fields["shared_bytes"])
    assert [jit.load(SPEC, 3), jit.load(SPEC, 3)] == [wanted, wanted]
    assert driver.asked == asked(b"moecomm_dispatch", fields["shared_bytes"])


def test_a_kernel_for_one_job_is_loaded_once_a_device(driver: Driver) -> None:
    assert [plain_kernel.load(PLAIN, 3), plain_kernel.load(PLAIN, 3)] == [73, 73]
    assert driver.asked == [("cuCtxGetCurrent",), *asked(b"moecomm_plain", 0)]


def test_other_gpus_have_their_own_code(driver: Driver) -> None:
    driver.capability = (10, 3)
    plain_kernel.load(PLAIN, 3)
    assert ("cuModuleLoadData", b"sm_103") in driver.asked


def test_nvshmem_hears_of_a_module_before_its_functions(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "register_module", lambda module: driver.asked.append(("told", module)))
    loader.load(3, str.encode, "entry", "nvshmem", 0)
    names = [name for name, *_ in driver.asked if name != "cuThreadExchangeStreamCaptureMode"]
    assert names.index("cuModuleLoadData") + 1 == names.index("told") == names.index("cuModuleGetFunction") - 1


def test_nvshmem_may_copy_while_a_graph_is_captured(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "register_module", lambda module: driver.asked.append(("told", module)))
    loader.load(3, str.encode, "entry", "nvshmem", 0)
    at, exchange = driver.asked.index(("told", 72)), "cuThreadExchangeStreamCaptureMode"
    assert (driver.asked[at - 1], driver.asked[at + 1]) == ((exchange, "relaxed"), (exchange, "global"))


def test_a_failure_is_named_and_leaves_the_context_as_it_was(driver: Driver) -> None:
    driver.failing = "cuModuleLoadData"
    with pytest.raises(RuntimeError, match="cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE"):
        jit.load(SPEC, 3)
    assert driver.asked[-1] == ("cuCtxPopCurrent",)
    with pytest.raises(RuntimeError):  # it is not taken for loaded
        jit.load(SPEC, 3)


class Compiler:
    """Cubins that lack the descriptor of memory, up to the `good`-th."""

    def __init__(self, good: int) -> None:
        self.good, self.sources, self.plain = good, list[str](), b"good"

    def __call__(self, core: Any, source: str, arch: str) -> tuple[bytes, str]:
        if source == loader._PLAIN:
            return self.plain, "log"
        self.sources.append(source)
        return (b"good" if len(self.sources) == self.good else b"bad"), "log"


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_core", lambda: None)
    monkeypatch.setattr(loader, "lacks_descriptor", lambda cubin: cubin == b"bad")
    monkeypatch.setattr(loader, "_descriptor_is_known", loader._descriptor_is_known.__wrapped__)


@pytest.mark.parametrize("good", [1, 2])
def test_what_the_compiler_leaves_out_is_called(good: int, looked_at: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(good)
    monkeypatch.setattr(loader, "_compile", compiler)
    assert loader.build("source", "lsa", "sm_90a") == (b"good", "log")
    assert compiler.sources == ["source", "#define MOECOMM_CALLS\nsource"][:good]


def test_a_kernel_that_can_not_reach_memory_is_not_loaded(looked_at: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_compile", Compiler(3))
    monkeypatch.setattr(linking, "nvrtc_version", lambda: (13, 0))  # of what need not be installed
    with pytest.raises(Unsupported, match=r"NVRTC 13\.0 makes a kernel that can't reach memory"):
        loader.build("source", "lsa", "sm_90a")
    assert loader.build("source", "lsa", "sm_100")[1] == "log"  # of which nobody knows


def test_code_that_nobody_knows_is_loaded(looked_at: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load code of a compiler for which even a kernel that stores a word seems to lack what that takes."""
    compiler = Compiler(3)
    compiler.plain = b"bad"
    monkeypatch.setattr(loader, "_compile", compiler)
    assert loader.build("source", "lsa", "sm_90a") == (b"bad", "log")
    assert compiler.sources == ["source"]
