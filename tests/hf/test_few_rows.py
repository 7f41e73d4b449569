"""Linear layers with the two sides exchanged give the same, and are used only where they are faster."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from kvboost.hf import few_rows
from kvboost.hf.few_rows import exchanged, shapes_to_exchange


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (16, 1, 7), (2, 3, 7), (1, 7)])
def test_the_result_is_that_of_linear(shape: tuple[int, ...], biased: bool) -> None:
    made = torch.Generator().manual_seed(1)
    rows, weight, bias = (torch.randn(size, generator=made) for size in (shape, (11, 7), (11,)))
    given = bias if biased else None
    found = exchanged(rows, weight, given)
    torch.testing.assert_close(found, linear(rows, weight, given))
    assert found.is_contiguous()
    assert found.shape == (*shape[:-1], 11)


def test_the_faster_way_is_taken_for_each_shape_and_logged_once(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvboost.engine")
    model = tiny("llama")
    up, down = (getattr(model.model.layers[0].mlp, f"{name}_proj").weight.shape for name in ("up", "down"))
    now = [0.0]
    monkeypatch.setattr(few_rows.time, "perf_counter", lambda: now[0])

    def taking(slow: torch.Size) -> Callable[..., Any]:
        def way(rows: torch.Tensor, weight: torch.Tensor, bias: None) -> None:
            assert rows.shape[1] == weight.shape[1]
            now[0] += 2.0 if weight.shape == slow else 1.0

        return way

    monkeypatch.setattr(few_rows, "linear", taking(up))
    monkeypatch.setattr(few_rows, "exchanged", taking(down))
    assert shapes_to_exchange(model) == {up}
    [line] = caplog.messages
    assert f"for 12 to 48 rows: {up[0]}x{up[1]} (" in line
    assert f"{down[0]}x{down[1]}" not in line


def test_weights_that_cannot_be_timed_are_left_alone(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "exchanged", lambda *given: (_ for _ in ()).throw(RuntimeError("no kernel")))
    assert shapes_to_exchange(tiny("llama")) == frozenset()


def test_other_dtypes_are_left_alone(tiny: Callable[..., Any]) -> None:
    assert not shapes_to_exchange(copy.deepcopy(tiny("llama")).to(torch.bfloat16))
    assert not shapes_to_exchange(torch.nn.ReLU())
