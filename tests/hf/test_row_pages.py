"""Rows are attended to where they lie, whatever their lengths, windows and shared keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.capacity import row_capacity
from kvboost.hf import row_pages as module
from kvboost.hf.probe import probe_model
from kvboost.hf.ragged import RaggedRunner, probe_ragged
from kvboost.hf.row_pages import PAGE, RowPages, has_kernel
from kvboost.hf.runner import ModelRunner
from tests.hf.test_ragged import filled, joined

_TEXT = torch.randint(3, 97, (400,), generator=torch.Generator().manual_seed(3)).tolist()


def documented(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """``varlen_attn`` as torch documents it, for pages and one query for each sequence."""
    assert enable_gqa
    assert max_q == 1
    assert key.shape[1] % 256 == 0
    assert key.stride(3) == value.stride(3) == 1
    assert all(one.dtype is torch.int32 for one in (cu_seq_q, cu_seq_k, seqused_k, block_table))
    assert cu_seq_q.tolist() == list(range(len(query) + 1))
    assert torch.equal(cu_seq_k.diff(), seqused_k)
    assert max_k == int(seqused_k.max())
    out = []
    for row, (one, used, table) in enumerate(zip(query, seqused_k.tolist(), block_table.tolist(), strict=True)):
        keys, values = (pool[table].flatten(0, 1)[:used].transpose(0, 1) for pool in (key, value))
        seen = torch.ones(used, dtype=torch.bool)
        assert window_size == (-1, -1) or window_size[1] == 0
        if window_size[0] >= 0:
            seen[: max(0, used - 1 - window_size[0])] = False
        assert row < len(query)
        attended = torch.nn.functional.scaled_dot_product_attention(
            one[:, None], keys, values, attn_mask=seen[None], scale=scale, enable_gqa=True
        )
        out.append(attended[:, 0])
    return torch.stack(out)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=5),
    spare=st.integers(0, 2),
    heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    window=st.sampled_from([None, 1, 100, 300]),
)
def test_a_view_of_rows_is_pages(lengths: list[int], spare: int, heads: tuple[int, int], window: int | None) -> None:
    generator, dim = torch.Generator().manual_seed(1), 8
    capacity = -(-(max(lengths) + 1) // PAGE) * PAGE
    query = torch.randn(len(lengths), heads[0], 1, dim, generator=generator)
    keys, values = torch.randn(2, len(lengths) + spare, heads[1], capacity, dim, generator=generator)
    pages = RowPages(torch.tensor(lengths), longest=max(lengths) + 1, capacity=capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "varlen_attn", documented)
        found = pages.attend(query, keys, values, 0.3, window)
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length + 1 - window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[row], keys[row, :, first : length + 1], values[row, :, first : length + 1], scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_decoding_in_pages_gives_what_each_gets_alone(
    family: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "varlen_attn", documented)
    runner = ModelRunner(tiny(family))
    ragged = RaggedRunner(runner, in_pages=True)
    alone = [filled(runner, prompt) for prompt in (_TEXT[:40], _TEXT[50:53], _TEXT[60:320])]
    batch, _ = joined(alone)
    assert [len(group.rows) for group in batch.groups] == [2, 1]
    for step in range(3):
        tokens = [_TEXT[350 + step + i] for i in range(3)]
        found = ragged.decode(tokens, batch)
        expected = [runner.append([t], cache, logits=True) for t, cache in zip(tokens, alone, strict=True)]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_a_kernel_that_gives_something_else_is_not_used(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = ModelRunner(tiny("llama"))
    layout = probe_model(runner.model).layout
    monkeypatch.setattr("kvboost.hf.ragged.has_kernel", lambda device: True)

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel on this device")

    for kernel, in_pages in ((documented, True), (lambda query, *_, **__: query * 0, False), (failing, False)):
        monkeypatch.setattr(module, "varlen_attn", kernel)
        caplog.clear()
        with caplog.at_level("INFO", logger="kvboost.hf.ragged"):
            assert probe_ragged(runner, layout)._in_pages is in_pages
        assert ("under a mask" in caplog.text) is not in_pages


def test_where_there_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_kernel(torch.device("cpu"))
    monkeypatch.setattr(module, "varlen_attn", documented)
    assert has_kernel(torch.device("cuda"))
    monkeypatch.setattr(module, "varlen_attn", lambda query, key, value: query)  # before pages
    assert not has_kernel(torch.device("cuda"))


@given(st.integers(1, 200_000))
def test_every_row_is_whole_pages(tokens: int) -> None:
    assert row_capacity(tokens) % PAGE == 0
