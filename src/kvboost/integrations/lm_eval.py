"""EleutherAI's evaluation harness over an engine: a shared beginning is read once, and scores are exact.

``python -m kvboost.integrations.lm_eval --model kvboost --model_args pretrained=MODEL --tasks ...`` is the harness' own
command with one more model; its registry takes no plugins. Everything but scoring is the harness' Hugging Face model,
whose ``generate`` is attached. Invariant: log-likelihoods are those of that model up to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kvboost.config import SETTINGS
from kvboost.engine.attach import attach
from kvboost.errors import ConfigError, with_extra

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(f"EleutherAI's harness is not installed: {with_extra('evals')}") from error

Request = tuple[Any, list[int], list[int]]
"""Its texts, and the tokens of context and continuation."""


@register_model("kvboost")
class KVBoostLM(HFLM):  # type: ignore[misc]  # the harness is untyped
    """The harness' Hugging Face model; arguments that are settings of KVBoost, such as disk_cache_dir, go there."""

    def __init__(self, pretrained: Any, **arguments: Any) -> None:
        settings = {name: arguments.pop(name) for name in SETTINGS if name in arguments}
        for name in ("mixed_precision_dtype", "softmax_dtype"):
            if arguments.get(name) is not None:
                raise ConfigError(f"{name} is not for this model: scores are in the model's dtype; give dtype= instead")
        super().__init__(pretrained, **arguments)
        self.engine = attach(self.model, self.tokenizer, **settings).engine

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it is greedy. Those of one context run together."""
        pairs = []
        for _, context, continuation in requests:
            assert len(continuation) <= self.max_length, "a continuation is longer than the model reads"
            kept = max(1, self.max_length + 1 - len(continuation))  # what is too long is cut on the left, as there
            pairs.append((context[-kept:], [continuation]))
        scores = [score for (score,) in self.engine.score_many(pairs, progress=not disable_tqdm)]
        found = [(score.logprob, score.is_greedy) for score in scores]
        for (texts, *_), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        self.engine.flush()
        return found


if __name__ == "__main__":
    options = 2 if sys.argv[1:2] == ["run"] else 1
    if sys.argv[options:] and sys.argv[options].startswith("-"):
        sys.argv[options:options] = ["--model", "kvboost"]  # unless a later --model says otherwise
    cli_evaluate()
