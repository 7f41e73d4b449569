"""Functions are computed on whole vectors, so that a row's bits do not depend on how many rows there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvboost.core.verify import same_bits
from kvboost.hf.cache import SlabCache
from kvboost.hf.numerics.elementwise import functions_of, missing
from kvboost.hf.numerics.forwards import replaced
from kvboost.hf.numerics.tiles import Tiles
from kvboost.hf.probe import probe_model
from tests.helpers.models import tiny_model


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def shares(numbers: int, threads: int) -> set[int]:
    """How many numbers torch gives to a thread, for functions with the usual grain and for GELU."""
    found = set()
    for grain in (32768, numbers // threads if numbers > 24576 else 32768):
        used = min(threads, -(-numbers // grain))
        share = -(-numbers // used)
        found |= {min(share, numbers - start) for start in range(0, numbers, share)}
    return found


def whole(numbers: int, threads: int) -> bool:
    return all(share % 64 == 0 for share in shares(numbers, threads))


@given(
    rows=st.integers(1, 5000),
    widths=st.lists(st.integers(1, 12000) | st.sampled_from([2, 3, 61, 127, 10007]), min_size=1, max_size=2),
    threads=st.integers(1, 16),
)
@example(rows=4999, widths=[10007], threads=13)  # primes
@example(rows=1, widths=[10007], threads=16)
@example(rows=2048, widths=[16, 32], threads=2)  # just two threads
@example(rows=25, widths=[1024], threads=2)  # GELU uses two threads, others one
@settings(max_examples=150, deadline=None)
def test_every_thread_gets_whole_vectors(rows: int, widths: list[int], threads: int) -> None:
    extra = missing(rows, tuple(widths), threads)
    assert extra >= 0
    for width in widths:
        assert whole((rows + extra) * width, threads)
    if threads == 1:
        assert extra == -rows % math.lcm(*(64 // math.gcd(64, width) for width in widths)), "no more than needed"


class Function(torch.nn.Module):
    """Doubles what it is given, and records it."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def forward(self, x: Any, *args: Any) -> torch.Tensor:
        self.given.append((x, *args))
        return (torch.stack(x) if isinstance(x, list) else x) * 2


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (2, 5, 7), (0, 7)])
def test_rows_are_padded_and_cut(shape: tuple[int, ...]) -> None:
    module, x = Function(), torch.randn(shape)
    with replaced(functions_of(module)):
        assert same_bits(module(x, "more"), x * 2)
    given, more = module.given.pop()
    assert more == "more"
    assert given.shape == (*shape[:-2], 64 if shape[-2] else 0, 7)
    assert given.is_contiguous()
    assert same_bits(given[..., : shape[-2], :], x)
    assert same_bits(module(x), x * 2)
    assert module.given.pop()[0] is x


def test_what_is_no_matrix_is_left_alone() -> None:
    module, rows = Function(), [torch.randn(7) for _ in range(9)]
    with replaced(functions_of(module)):
        for _ in range(2):
            assert same_bits(module(rows), torch.stack(rows) * 2)
            assert same_bits(module(x=rows[0]), rows[0] * 2)
            assert same_bits(module(x=torch.stack(rows)), torch.stack(rows) * 2)
            assert same_bits(module(rows[0]), rows[0] * 2)
            assert module(3) == 6
            assert module.given[0][0] is rows
            module(torch.randn(5, 7))  # and what was padded before changes nothing
            module.given.clear()


def test_no_list_of_modules_and_no_linear_layer_is_a_function() -> None:
    """Adapters bring hundreds of empty lists, and quantized layers keep their weights elsewhere."""
    bare = torch.nn.Linear(4, 4, bias=False)
    del bare.weight
    model = torch.nn.Sequential(torch.nn.ModuleDict(), torch.nn.ParameterDict(), torch.nn.ModuleList(), bare)
    model.append(torch.nn.SiLU())
    assert [type(function) for function, _ in functions_of(model)] == [torch.nn.SiLU]


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_step_no_function_is_padded(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    layout = probe_model(model).layout
    tiles, ids = Tiles(model, layout, granule=256, budget=2**30), torch.arange(5).view(1, -1)
    seen: list[int] = []
    for function, _ in functions_of(model):
        own = function.forward

        def forward(x: torch.Tensor, *args: Any, own: Any = own, **kwargs: Any) -> Any:
            seen.append([x, *args, *kwargs.values()][-1].numel())
            return own(x, *args, **kwargs)

        monkeypatch.setattr(function, "forward", forward)
    with torch.no_grad():
        model(input_ids=ids)
        plain, cache = seen.copy(), SlabCache(layout, capacity=5)
        seen.clear()
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext(), tiles.step(cache, 5):
            model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
            if fails:
                raise KeyboardInterrupt
        assert all(inside > outside for inside, outside in zip(seen, plain, strict=True))
        seen.clear()
        model(input_ids=ids)
    assert seen == plain


_LONG = 640  # rows: enough numbers for two threads
_VALUES = 3 * torch.randn(1, _LONG, 120, generator=torch.Generator().manual_seed(1))


def run(function: torch.nn.Module, start: int, end: int) -> tuple[torch.Tensor, ...]:
    if "Rotary" not in type(function).__name__:
        return (function(_VALUES[:, start:end]),)
    layer_type = ["full_attention"] if "Gemma3" in type(function).__name__ else []
    return function(_VALUES, torch.arange(start, end).view(1, -1), *layer_type)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "gemma3_text"])
def test_rows_have_the_same_bits_alone_and_among_others(
    family: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SiLU, three kinds of GELU, and rotary angles with one table of frequencies and with several."""
    model = tiny_model(family, intermediate_size=120)
    functions = {type(function): (function, forward) for function, forward in functions_of(model)}
    assert len(functions) == (1 if family == "gpt2" else 2)
    for kind, (function, forward) in functions.items():
        counts: list[int] = []
        own = function.forward

        def counted(*args: Any, own: Any = own, counts: list[int] = counts, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            counts += [part.numel() for part in output]
            return output

        monkeypatch.setattr(function, "forward", counted)
        with replaced([(function, forward)]):
            together = run(function, 0, _LONG)
            for rows in range(1, 71):
                start = 8 * rows - 7
                alone = run(function, start, start + rows)
                for one, other in zip(alone, together, strict=True):
                    assert same_bits(one, other[:, start : start + rows]), (kind, rows)
        # The bits do not show this where both implementations of a function happen to agree.
        assert counts
        assert all(whole(count, threads) for count in counts), kind
