"""Weights that do not fit into memory, brought there layer by layer."""

from kvboost.offload.weights.link import AcceleratorLink, Budget, HostLink, Link
from kvboost.offload.weights.load import load_streamed
from kvboost.offload.weights.plan import Unit, WeightPlan, plan_weights
from kvboost.offload.weights.source import Extent, FileSource, HostSource, Source
from kvboost.offload.weights.streamer import StreamStats, WeightStreamer, describe_weights, streamer_of

__all__ = [
    "AcceleratorLink",
    "Budget",
    "Extent",
    "FileSource",
    "HostLink",
    "HostSource",
    "Link",
    "Source",
    "StreamStats",
    "Unit",
    "WeightPlan",
    "WeightStreamer",
    "describe_weights",
    "load_streamed",
    "plan_weights",
    "streamer_of",
]
