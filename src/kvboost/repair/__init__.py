"""Which rows of moved chunks to compute again. Chooses; the engine computes."""

from kvboost.repair.bound import DisagreementBound, ReuseGuard
from kvboost.repair.calibration import Calibration, CalibrationRow, Comparisons, conclude
from kvboost.repair.levels import Repair, choose_repair, tolerated_share
from kvboost.repair.strategies import STRATEGIES, Auto, CacheBlend, First, Nothing, Query, Selective, make_strategy

__all__ = [
    "STRATEGIES",
    "Auto",
    "CacheBlend",
    "Calibration",
    "CalibrationRow",
    "Comparisons",
    "DisagreementBound",
    "First",
    "Nothing",
    "Query",
    "Repair",
    "ReuseGuard",
    "Selective",
    "choose_repair",
    "conclude",
    "make_strategy",
    "tolerated_share",
]
