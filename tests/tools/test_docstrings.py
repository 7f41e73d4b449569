from __future__ import annotations

import pytest

pytest.importorskip("griffe")

from tools.docstrings import plain


def test_roles_become_code() -> None:
    assert (
        plain("As :meth:`lease` of :class:`~kvboost.X`, ``a`` and a: `b`.")
        == "As `lease` of `kvboost.X`, ``a`` and a: `b`."
    )
