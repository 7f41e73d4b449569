"""How rows are grouped for the kernels, apart from chunks and steps."""

from kvboost.hf.numerics.choose import ChosenNumerics, KnownTiles, budget_to_pack, choose_numerics
from kvboost.hf.numerics.tiles import Tiles

__all__ = ["ChosenNumerics", "KnownTiles", "Tiles", "budget_to_pack", "choose_numerics"]
