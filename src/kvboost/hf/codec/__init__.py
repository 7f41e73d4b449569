"""Ways of storing KV in fewer bits: what ``kv_cache_bits`` chooses between."""

from __future__ import annotations

from kvboost.errors import ConfigError
from kvboost.hf.cache import KVLayout
from kvboost.hf.codec.base import KVCodec
from kvboost.hf.codec.int4 import Int4Codec
from kvboost.hf.codec.int8 import Int8Codec

__all__ = ["CODECS", "Int4Codec", "Int8Codec", "KVCodec", "codec_for"]

CODECS: dict[int, type[KVCodec]] = {16: KVCodec, 8: Int8Codec, 4: Int4Codec}
"""By ``kv_cache_bits``. 16 means: as the model has them, whatever its precision."""


def codec_for(bits: int, layout: KVLayout) -> KVCodec:
    """The codec for ``kv_cache_bits``, for blocks of this layout."""
    if bits not in CODECS:
        raise ConfigError(f"kv_cache_bits={bits} is not known; use one of {', '.join(map(str, CODECS))}")
    return CODECS[16 if layout.counts else bits](layout)  # there is nothing to round in zeros
