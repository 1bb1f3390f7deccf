"""The documented training of a small GPT, with fewer steps."""

from __future__ import annotations

import pytest

pytest.importorskip("tests.integrations.megatron_core", reason="needs megatron-core: pip install megatron-core")

from tests.integrations import megatron_train


@pytest.mark.long
def test_losses_over_moecomm_are_those_of_all_to_all(capfd: pytest.CaptureFixture[str]) -> None:
    assert megatron_train.main(3) == 0
    assert "all losses are the same" in capfd.readouterr().out
