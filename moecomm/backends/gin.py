"""NCCL's GPU-initiated networking: loads and stores inside NCCL's LSA team, put and signal to the ranks of others.

Where there is no RDMA NIC, bytes go through our RMA plugin (moecomm.rma_plugin).  NCCL reads its plugins and its
variables once, when the first communicator of a process is made: the first Buffer of this backend has to be opened
before any other communicator, torch.distributed's among them, or the variables have to be in the environment.

What NCCL has read it keeps.  The environment is put back, but communicators that the process makes later, those of
torch.distributed among them, have what NCCL read here first:

| what | set where |
| --- | --- |
| NCCL_NVLS_ENABLE=0 | there is no RDMA NIC; NCCL is older than 2.32 (see windows_nccl: lsa's windows do it as well) |
| the other NCCL_ variables of rma_plugin.environment() | there is no RDMA NIC: our plugin, GIN by the proxy, ... |
| NCCL_LSA_TEAM_SIZE | `domain_ranks` are fewer than all ranks; a later Buffer with another number is refused |
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack, suppress
from typing import Any

import torch

from moecomm import _native, config, rma_plugin, shims
from moecomm.backends import gpu_peers, lsa, nccl_device, nic, windows
from moecomm.backends.reach import Layout, Reach
from moecomm.backends.windows import local, nccl
from moecomm.errors import Unsupported
from moecomm.gpu import cuda_driver
from moecomm.ranks.collective import all_or_none
from moecomm.ranks.group import Rendezvous

_TYPES = {2: "proxy", 3: "gdaki", 4: "gpi"}  # ncclGinType_t
_CONTEXTS = 4  # asked for: each has queues of its own
_QUEUE, _POSTS, _WARPS = (
    256,
    2,
    16,
)  # entries of a queue, those that moecomm_gin_has_room counts a post, warps of a block
_LINGER_S = 2.0
_COMMUNICATOR = 256  # its place behind struct GinLink of csrc/transport/gin.cuh

# (tokens, tokens of a chunk at least).  Without a NIC a thread of the host posts every put, which takes it 16 us.
_PROXY_CHUNKS = ((1, 16), (512, 32))

ring_tokens, packet_bytes = lsa.ring_tokens, lsa.packet_bytes


def missing() -> str:
    """Return "" if NCCL can put from kernels here; else the first thing missing, as a sentence."""
    return lsa.missing() or nccl.missing() or _missing_gin()


def direct_bytes(ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
    """Return the room of lsa; none without a NIC, where a put for each token would take longest."""
    return lsa.direct_bytes(ranks, max_tokens, staged_row_bytes) if nic.has_rdma() else 0


def _missing_gin() -> str:
    import nccl.core

    shim = shims.find(wanted_shim())
    if shim.missing:
        return shim.missing
    library = nccl.core.get_version().libnccl
    if library.version.release < _version(shim):
        return (
            f"NCCL {library.version} is loaded ({library.path}) and the shim was compiled for {shim.headers}; "
            f"pip install 'nvidia-nccl-{cuda_driver.wheel_suffix()}>={shim.headers.split()[-1]}'"
        )
    if not cuda_driver.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", torch.cuda.current_device()):
        return f"NCCL has no GIN for {torch.cuda.get_device_name()}: no GPUDirect RDMA for memory of CUDA VMM"
    if not nic.has_rdma():
        try:
            rma_plugin.path()
        except Unsupported as error:
            return f"there is no RDMA NIC, and without one bytes go through a plugin.  {error}"
    return ""


def wanted_shim() -> str:
    """The shim of kernels that put here, as far as can be told before NCCL has chosen among its kinds of GIN."""
    return "gin" if nic.has_rdma() else "gin_proxy"


def _version(shim: shims.Shim) -> tuple[int, ...]:
    return tuple(int(number) for number in shim.headers.split()[-1].split("."))


class GinWindow:
    """A Window of NCCL, with its device communicator."""

    def __init__(
        self,
        kind: str,
        memory: nccl.Memory,
        peers: list[int],
        communicator: Any,
        device: nccl_device.DeviceCommunicator,
    ) -> None:
        self.kind, self.peers = kind, peers
        self.owner: object = memory
        self.address, self.nbytes = memory.address, memory.nbytes
        self._communicator, self._device = communicator, device

    def close(self) -> None:
        """Drop the peers' memory and end the communicator.

        It waits for no other rank.
        """
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            _close(self._device)
            nccl.end(communicator)


def _close(device: nccl_device.DeviceCommunicator) -> None:
    with suppress(RuntimeError):  # there is nothing left to do about a failure
        device.close()


class GinReach(Reach):
    """A communicator with GIN; its LSA team is a domain."""

    backend = "gin"
    near = False
    _watched: str | None = None  # the job of our communicator, if our plugin carries it

    def _connect(self, domain_ranks: int) -> None:
        ranks = self.ranks
        with all_or_none(ranks):
            if reason := windows.nccl_missing(self.peers):
                raise Unsupported(reason)
            if ranks.in_process:
                raise Unsupported("ranks that are threads of one process; backend 'gin' wants a process a rank")
        self._watched = None if nic.has_rdma() else secrets.token_hex(16)
        self._variables = {} if self._watched is None else rma_plugin.environment(self._watched)
        if domain_ranks not in (0, ranks.ranks):
            self._variables["NCCL_LSA_TEAM_SIZE"] = str(domain_ranks)
        with config.variables(self._variables):
            self._communicator = nccl.connect(ranks)
        try:
            with all_or_none(ranks):
                properties = nccl_device.properties(self._communicator)
                if properties.gin_type == 0 or not properties.device_api:
                    raise Unsupported(_NO_GIN)
                if domain_ranks not in (0, team := ranks.ranks // properties.lsa_teams):
                    raise Unsupported(
                        f"domain_ranks={domain_ranks}: NCCL's LSA team has {team}; see NCCL_LSA_TEAM_SIZE"
                    )
        except BaseException:
            nccl.end(self._communicator)
            raise
        self._kind = _TYPES.get(properties.gin_type, f"type {properties.gin_type}")
        self.shim = "gin_proxy" if self._kind == "proxy" else "gin"
        if properties.lsa_teams > 1:
            self.domain_ranks, self.transport = team, self.shim
            # Others may still add to our signals when we are done with the last round; else they can put no more.
            self.linger_s = _LINGER_S
            self.most_blocks = _CONTEXTS * (_QUEUE // _POSTS // _WARPS)
            if self._kind == "proxy":
                self.least_chunks = _PROXY_CHUNKS

    def watch(self, abort_word: int) -> None:
        if self._watched is not None:
            rma_plugin.watch(self._watched, abort_word)

    def ignore(self, rank: int, ignored: bool) -> None:
        if self._watched is not None:
            rma_plugin.ignore(self._watched, rank, ignored)

    def losses(self) -> dict[int, str]:
        return {} if self._watched is None else rma_plugin.losses(self._watched)

    def open_window(self, layout: Layout) -> windows.Window:
        """Open windows with a signal for each word of `layout.signals`, and one more, which rounds do not use."""
        if self.ranks.ranks == 1:  # nobody to reach
            return local.open_window(self.ranks, layout.bytes, self.device, resident=layout.staging)
        ranks, communicator = self.ranks, self._communicator
        with ExitStack() as undo, config.variables(self._variables):
            undo.callback(nccl.end, communicator)
            memory, window = nccl.register(ranks, communicator, layout.bytes, self.device)
            undo.callback(memory.free)
            undo.callback(nccl.end, communicator)  # first: it still has the memory
            with all_or_none(ranks):
                version, signals = _version(shims.find(self.shim)), spare_signal(layout) + 1
                device = nccl_device.DeviceCommunicator(communicator, version, signals=signals, contexts=_CONTEXTS)
                undo.callback(_close, device)
            with all_or_none(ranks):
                peers = self._addresses(window, memory.address)
                self._link = _link(window.handle, device.data, self.device)
            undo.pop_all()
        self.link = self._link.data_ptr()
        return GinWindow(self._kind, memory, peers, communicator, device)

    def _addresses(self, window: Any, own_address: int) -> list[int]:
        rank, size = self.ranks.rank, self.domain_ranks or self.ranks.ranks
        peers = []
        for peer in range(self.ranks.ranks):
            near = peer // size == rank // size
            peers.append(nccl.peer_address(window, peer, rank, own_address) if near else 0)
            if near and not peers[-1]:
                raise Unsupported(
                    f"the GPU of rank {peer} is not in the LSA team of rank {rank}, which NCCL says it is"
                )
        return peers


def spare_signal(layout: Layout) -> int:
    """The signal that no round uses, behind those of `layout.signals`: what benchmarks signal with."""
    return int(layout.counters - layout.signals) // 8


def _link(window: int, communicator: bytes, device: torch.device) -> torch.Tensor:
    """struct GinLink of csrc/transport/gin.cuh, with the device communicator behind it, in memory of the GPU."""
    link = torch.zeros(_COMMUNICATOR + len(communicator), dtype=torch.uint8, device=device)
    words = (link.data_ptr() + _COMMUNICATOR).to_bytes(8, "little") + window.to_bytes(8, "little")
    content = bytearray(words.ljust(_COMMUNICATOR, b"\0") + communicator)
    link.copy_(torch.frombuffer(content, dtype=torch.uint8))
    torch.cuda.synchronize(device)
    return link


_NO_GIN = (
    "NCCL finds no GIN: neither an RDMA NIC nor the plugin.  It looks for them once a process, when the first "
    "communicator is made; open this Buffer before others, or start the process with what "
    "moecomm.rma_plugin.environment() says"
)


def open(  # noqa: A001
    ranks: Rendezvous, shape: _native.Shape, device: torch.device | None, timeout_s: float
) -> lsa.LsaSession:
    """Collective: see moecomm.ranks.session.Backend."""
    return lsa.open_session(ranks, shape, device, timeout_s, GinReach, missing())


def open_peers(ranks: Rendezvous, nbytes: int, device: torch.device | None, timeout_s: float) -> gpu_peers.GpuPeers:
    """Open memory of all ranks, without a session.  Collective: see moecomm.ranks.session.Backend."""
    return gpu_peers.open_peers(ranks, nbytes, device, timeout_s, GinReach, missing())
