"""How rows are grouped for the kernels, apart from chunks and steps."""

from kvboost.hf.numerics.choose import ChosenNumerics, choose_numerics
from kvboost.hf.numerics.tiles import Tiles

__all__ = ["ChosenNumerics", "Tiles", "choose_numerics"]
