"""The model side, and the only place that imports Transformers."""

from kvboost.model.cache import KVLayout, RowChanges, SlabCache
from kvboost.model.codec import CODECS, KVCodec, codec_for
from kvboost.model.draft import Draft, make_draft
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
from kvboost.model.loading import load_model, load_tokenizer_of
from kvboost.model.paging import PagedCache, least_budget, probe_paging
from kvboost.model.probe import ModelFacts, probe_model
from kvboost.model.ragged import RaggedRunner, SharedStart, probe_ragged
from kvboost.model.rates import measure_rates
from kvboost.model.rope import KeyMover, probe_mover
from kvboost.model.rows import RowRunner, probe_rows
from kvboost.model.runner import ModelRunner
from kvboost.model.shape import ModelOnDisk, model_on_disk, shape_of, stored_bytes_per_token, weights_of
from kvboost.model.speculation import speculates
from kvboost.model.spread import Spread
from kvboost.model.streaming import describe_weights, streamer_of

__all__ = [
    "CODECS",
    "Decoded",
    "Draft",
    "KVCodec",
    "KVLayout",
    "KeyMover",
    "ModelFacts",
    "ModelIdentity",
    "ModelOnDisk",
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
    "load_tokenizer_of",
    "make_draft",
    "measure_rates",
    "model_on_disk",
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
    "shape_of",
    "speculates",
    "stored_bytes_per_token",
    "streamer_of",
    "weights_of",
]
