"""Weight streaming: weights that do not fit into memory are brought there layer by layer."""

from kvboost.offload.weights.link import AcceleratorLink, Budget, HostLink, Link
from kvboost.offload.weights.load import load_model, load_streamed
from kvboost.offload.weights.on_disk import ModelOnDisk, model_on_disk
from kvboost.offload.weights.placement import Unit, WeightPlacement, place_weights
from kvboost.offload.weights.source import Extent, FileSource, HostSource, Source
from kvboost.offload.weights.streamer import StreamStats, WeightStreamer, streamer_of

__all__ = [
    "AcceleratorLink",
    "Budget",
    "Extent",
    "FileSource",
    "HostLink",
    "HostSource",
    "Link",
    "ModelOnDisk",
    "Source",
    "StreamStats",
    "Unit",
    "WeightPlacement",
    "WeightStreamer",
    "load_model",
    "load_streamed",
    "model_on_disk",
    "place_weights",
    "streamer_of",
]
