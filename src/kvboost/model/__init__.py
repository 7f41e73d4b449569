"""The model side, and the only place that imports Transformers."""

from kvboost.model.cache import KVLayout, RowChanges, SlabCache
from kvboost.model.codec import CODECS, KVCodec, codec_for
from kvboost.model.fingerprint import ModelIdentity
from kvboost.model.generation import (
    Decoded,
    end_token_ids,
    pad_token_id,
    reads_prompt_again,
    run_generate,
    sampling_arguments,
    sequences_per_prompt,
)
from kvboost.model.loading import load_model
from kvboost.model.paging import PagedCache, least_budget, probe_paging
from kvboost.model.probe import ModelFacts, probe_model
from kvboost.model.ragged import RaggedRunner, SharedStart, probe_ragged
from kvboost.model.rope import KeyMover, probe_mover
from kvboost.model.rows import RowRunner, probe_rows
from kvboost.model.runner import ModelRunner
from kvboost.model.spread import Spread
from kvboost.model.streaming import describe_weights, streamer_of

__all__ = [
    "CODECS",
    "Decoded",
    "KVCodec",
    "KVLayout",
    "KeyMover",
    "ModelFacts",
    "ModelIdentity",
    "ModelRunner",
    "PagedCache",
    "RaggedRunner",
    "RowChanges",
    "RowRunner",
    "SharedStart",
    "SlabCache",
    "Spread",
    "codec_for",
    "describe_weights",
    "end_token_ids",
    "least_budget",
    "load_model",
    "pad_token_id",
    "probe_model",
    "probe_mover",
    "probe_paging",
    "probe_ragged",
    "probe_rows",
    "reads_prompt_again",
    "run_generate",
    "sampling_arguments",
    "sequences_per_prompt",
    "streamer_of",
]
