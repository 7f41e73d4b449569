"""Weights that do not fit into memory, brought there layer by layer."""

from kvboost.model.streaming.link import AcceleratorLink, Budget, HostLink, Link
from kvboost.model.streaming.load import load_streamed
from kvboost.model.streaming.plan import Unit, WeightPlan, plan_weights
from kvboost.model.streaming.source import Extent, FileSource, HostSource, Source
from kvboost.model.streaming.streamer import StreamStats, WeightStreamer, describe_weights, streamer_of

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
