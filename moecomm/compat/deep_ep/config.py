"""deep_ep.Config: moecomm takes the number of SMs from it; the chunk sizes are kept, checked and not needed."""

from __future__ import annotations

from moecomm.base.validation import check_integer, is_integer
from moecomm.errors import BadInput

_METADATA = 128 * (8 + 4 + 4) + 8  # bytes beside a row, as deep_ep plans: 128 ids, weights and scales, and its source
_NVL_PEERS = 8


class Config:
    """SMs that a call may use, and the sizes of deep_ep's queues."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        check_integer("num_sms", num_sms, 0)
        for kind, send, receive in (
            ("nvl", num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens),
            ("rdma", num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens),
        ):
            check_integer(f"num_max_{kind}_chunked_send_tokens", send, 1)
            check_integer(f"num_max_{kind}_chunked_recv_tokens", receive, 2)
            if send >= receive:
                raise BadInput(f"num_max_{kind}_chunked_send_tokens", send, f"1 to {receive - 1}")
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Estimate the bytes of deep_ep's queues, for callers that compare sizes; moecomm sizes its windows itself."""
        check_integer("hidden_bytes", hidden_bytes, 0)
        check_integer("num_ranks", num_ranks, 1)
        slots = self.num_sms // 2 * min(num_ranks, _NVL_PEERS) * self.num_max_nvl_chunked_recv_tokens
        return -(-slots * (hidden_bytes + _METADATA) // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: no rank is behind RDMA."""
        return 0


def check_even_sms(new_num_sms: int) -> None:
    """Raise BadInput unless set_num_sms() takes it."""
    if not is_integer(new_num_sms) or not 2 <= new_num_sms <= 1024 or new_num_sms % 2:
        raise BadInput("new_num_sms", repr(new_num_sms), "an even number, 2 to 1024")
