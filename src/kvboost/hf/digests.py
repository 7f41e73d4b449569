"""How a weight is digested: one rule for weights in memory and for weights in files.

Used by the fingerprint and by the slabs of streamed weights. Invariant: the digest depends on the weight's name, type,
shape and bytes only, so that a streamed model and a resident one have the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hashlib import _Hash


def weight_hasher(name: str, dtype: torch.dtype, shape: Sequence[int]) -> _Hash:
    """A hasher to update with the weight's bytes, in order."""
    return hashlib.sha256(json.dumps([name, str(dtype), list(shape)]).encode())
