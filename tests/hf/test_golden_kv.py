"""The bits of KV change only with the key: where they would not, an upgrade would answer from other bits."""

from __future__ import annotations

import pytest

from kvboost.hf import attention
from kvboost.hf.code_digest import code_digest
from tests.helpers import golden_kv
from tests.helpers.golden_kv import CASES, RENEW, environment, kv_digest, one_thread


@pytest.mark.parametrize("case", CASES)
def test_bits_change_only_with_the_key(case: str) -> None:
    with one_thread():
        known = golden_kv.read().get(environment())
        if known is None:
            pytest.skip(f"no bits are known for this machine ({environment()}), so nothing was compared; {RENEW}")
        if known["code"] != code_digest():
            pytest.fail(f"code that decides bits has changed, and all keys with it; if that is meant: {RENEW}")
        # With this code on such a machine. The key would stay as it is.
        assert kv_digest(case) == known["kv"][case], "the bits of KV have changed, and the key has not"


def test_a_change_of_bits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest one, in what attention gives."""
    with one_thread():
        before = kv_digest("llama")
        assert kv_digest("llama") == before
        right = attention.flash
        monkeypatch.setattr(attention, "flash", lambda *given: right(*given) * (1 + 2**-22))
        assert kv_digest("llama") != before
