"""What must be known of a model before it is used: its KV, how its kernels round, its identity.

Called once when an engine is made. It takes seconds, so a bar is shown from the second one on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers
from transformers.utils.logging import is_progress_bar_enabled

from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.numerics import ChosenNumerics, choose_numerics
from kvboost.hf.probe import ModelFacts, probe_model
from kvboost.hf.shape import shape_of
from kvboost.steps import Numerics

_BAR = "preparing the model: {desc} ({n} of {total} done, {elapsed})"


class Study(NamedTuple):
    """What was found."""

    facts: ModelFacts
    numerics: ChosenNumerics
    identity: ModelIdentity


def study_model(model: Any, *, numerics: Numerics | None) -> Study:
    """Run ``model`` on short prompts and hash its weights. Raises UnsupportedModelError if it allows no reuse."""
    hidden = None if is_progress_bar_enabled() else True  # None: also where nobody looks, as in a log file
    with tqdm(total=3, bar_format=_BAR, delay=1, mininterval=0, leave=False, disable=hidden) as bar:
        facts = probe_model(model)
        _begin(bar, "testing how its kernels round")
        chosen = choose_numerics(model, facts.layout, shape_of(model, facts.layout), numerics=numerics)
        _begin(bar, "hashing its weights")
        identity = ModelIdentity(model, facts.layout, steps=chosen.spec)
        identity.snapshot()
    return Study(facts, chosen, identity)


def _begin(bar: Any, what: str) -> None:
    bar.set_description_str(what, refresh=False)
    bar.update()
