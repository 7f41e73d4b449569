"""Stores of a model on an accelerator, as far as a device without memory (``meta``) can stand for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from kvboost.config import EngineConfig
from kvboost.core.costs import CostModel
from kvboost.engine import stores
from kvboost.engine.stores import Stores
from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.codec import KVCodec
from kvboost.types import TOKEN_BYTES, KVBlock
from tests.contracts.blocks import block_of
from tests.contracts.content import prompt
from tests.helpers.simulated_link import SimulatedStreams

_META = torch.device("meta")
_LAYOUT = KVLayout((TensorSpec(2, 64, torch.bfloat16, _META),) * 4)


class _OnDevice(KVCodec):
    """Packs what lies on the device only, as a matrix there makes a codec do."""

    def pack(self, tensors: Sequence[torch.Tensor], *, start: int) -> tuple[torch.Tensor, ...]:
        assert all(tensor.device == _META for tensor in tensors)
        return super().pack(tensors, start=start)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    streams = SimulatedStreams()
    monkeypatch.setattr(stores, "streams_for", lambda devices: streams)
    yield Stores(EngineConfig(), layout=_LAYOUT, codec=_OnDevice(_LAYOUT), costs=CostModel(), repaired_share=0.0)
    streams.close()


def _from_a_file() -> KVBlock:
    (chunk,) = prompt("a")
    tensor = torch.zeros(4, 2, len(chunk.tokens) // TOKEN_BYTES, 64, dtype=torch.bfloat16)
    return replace(block_of(chunk), tensors=(tensor,))


def test_a_loaded_block_is_held_against_what_the_codec_packs_on_the_device(made: Stores) -> None:
    block = _from_a_file()
    assert made._fits(block)
    assert not made._fits(replace(block, tensors=block.tensors * 2))


def _copied_before(block: KVBlock) -> KVBlock:
    return replace(block, tensors=tuple(tensor.to(_META) for tensor in block.tensors))


def test_what_comes_from_a_file_goes_to_the_device_and_nothing_else_does(made: Stores) -> None:
    block = _from_a_file()
    foreign = replace(block, tensors=block.tensors * 2)
    assert made._uploads is not None
    copied, missed, same, refused = made._uploads.upload(iter([block, None, _copied_before(block), foreign]))
    assert copied is not None
    assert [tensor.device for tensor in copied.tensors] == [_META]
    assert copied.ready is not None
    assert missed is None
    assert same is not None
    assert same.ready is None
    assert refused is foreign
