"""Stores of a model on an accelerator, as far as a device without memory (``meta``) can stand for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvboost.engine.stores import _copy_to, _fits_codec
from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.codec import KVCodec
from kvboost.streams import BlockingStreams
from kvboost.types import TOKEN_BYTES
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


def test_a_loaded_block_is_held_against_what_the_codec_packs_on_the_device() -> None:
    (chunk,) = prompt("a")
    tensors = (torch.zeros(4, 2, len(chunk.tokens) // TOKEN_BYTES, 64, dtype=torch.bfloat16),)  # as a file has it
    fits = _fits_codec(_OnDevice(_LAYOUT), _LAYOUT)
    assert fits(replace(block_of(chunk), tensors=tensors))
    assert not fits(replace(block_of(chunk), tensors=tensors * 2))


def test_what_comes_from_a_file_goes_to_the_device_once() -> None:
    block = block_of(prompt("a")[0])
    streams = SimulatedStreams()
    copied = _copy_to({_META}, streams)(block)
    assert [tensor.device for tensor in copied.tensors] == [_META] * 2
    assert copied.ready is not None
    assert _copy_to({_META}, streams)(copied) is copied
    assert _copy_to({torch.device("cpu")}, BlockingStreams())(block) is block
    streams.close()
