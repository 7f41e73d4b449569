"""What must be known of a model before it is used: its KV, how its kernels round, its identity.

Called once when an engine is made. It takes seconds, so a bar is shown from the second one on, and what was found is
kept for the next start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers
from transformers.utils.logging import is_progress_bar_enabled

from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.kept_study import KeptStudy
from kvboost.hf.numerics import ChosenNumerics, budget_to_pack, choose_numerics
from kvboost.hf.probe import ModelFacts, probe_model
from kvboost.hf.shape import shape_of
from kvboost.steps import Numerics

_BAR = "preparing the model: {desc} ({n} of {total} done, {elapsed})"


class Study(NamedTuple):
    """What was found."""

    facts: ModelFacts
    numerics: ChosenNumerics
    identity: ModelIdentity


def study_model(model: Any, *, numerics: Numerics | None, packed_bytes: int | None = None) -> Study:
    """Run ``model`` on short prompts and hash its weights. Raises UnsupportedModelError if it allows no reuse.

    What an earlier start found of the same model on the same machine is not found again.
    """
    hidden = None if is_progress_bar_enabled() else True  # None: also where nobody looks, as in a log file
    with tqdm(total=3, bar_format=_BAR, delay=1, mininterval=0, leave=False, disable=hidden) as bar:
        bar.set_description_str("hashing its weights", refresh=False)
        identity = ModelIdentity(model)
        before = identity.snapshot().fields
        budget = budget_to_pack(model) if packed_bytes is None else packed_bytes
        kept = KeptStudy(model, before, [numerics, budget])
        known = kept.read()
        _begin(bar, "running it on a short prompt")
        facts = probe_model(model, layout=known.layout if known is not None else None)
        _begin(bar, "testing how its kernels round")
        chosen = choose_numerics(
            model,
            facts.layout,
            shape_of(model, facts.layout),
            numerics=numerics,
            packed_bytes=budget,
            known=known.tiles if known is not None else None,
        )
        identity.studied(facts.layout, steps=chosen.spec)
        # A model that makes buffers when it first runs must run at every start.
        if known is None and identity.snapshot().fields["weights"] == before["weights"]:
            kept.write(facts.layout, chosen.tiles)
    return Study(facts, chosen, identity)


def _begin(bar: Any, what: str) -> None:
    bar.set_description_str(what, refresh=False)
    bar.update()
