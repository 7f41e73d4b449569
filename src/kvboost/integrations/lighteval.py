"""lighteval over an engine: a shared beginning is read once, and scores are exact.

``python -m kvboost.integrations.lighteval model_name=MODEL,batch_size=8 TASKS`` is its own ``lighteval custom`` with
this file as the model. Everything but scoring is lighteval's Transformers model, whose ``generate`` is attached.
Invariant: log-likelihoods are those of that model up to rounding.
"""

# Annotations are evaluated: pydantic reads them, and lighteval loads this file without naming it in sys.modules.
import ast
import sys
from typing import Any, Self

from kvboost.config import SETTINGS
from kvboost.engine.attach import attach
from kvboost.errors import with_extra
from kvboost.types import Score

try:
    from lighteval.models.abstract_model import ModelConfig
    from lighteval.models.model_output import ModelResponse
    from lighteval.models.transformers.transformers_model import TransformersModel, TransformersModelConfig
    from pydantic import Field
except ImportError as error:
    raise ImportError(f"lighteval is not installed: {with_extra('lighteval')}") from error

Request = tuple[list[int], list[int]]
"""The tokens of context and continuation."""


class KVBoostConfig(TransformersModelConfig):  # type: ignore[misc]  # lighteval is untyped
    """What lighteval's Transformers model takes, and settings of KVBoost, such as disk_cache_dir."""

    settings: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_args(cls, args: str) -> Self:
        """Read ``model_name=MODEL,batch_size=8,...`` as lighteval does, or the name of a model alone."""
        arguments = ModelConfig._parse_args(args) if "=" in args else {"model_name": args}
        settings = {name: _value(arguments.pop(name)) for name in SETTINGS if name in arguments}
        return cls(**arguments, settings=settings)


class KVBoostModel(TransformersModel):  # type: ignore[misc]  # lighteval is untyped
    """lighteval's Transformers model."""

    def __init__(self, config: Any) -> None:
        """The ``custom`` backend has a name only: then that holds the arguments."""
        if not isinstance(config, KVBoostConfig):
            config = KVBoostConfig.from_args(config.model_name)
        super().__init__(config)
        self.attached = attach(self.model, self.tokenizer, **config.settings)

    def cleanup(self) -> None:
        """Close the engine too."""
        self.attached.detach()
        super().cleanup()

    def _loglikelihood_tokens(self, docs: list[Any], rolling: bool = False) -> list[Any]:
        """The log-likelihood of each document's choices."""
        requests = []
        for doc in docs:
            prompt = self.prompt_manager.prepare_prompt(doc)
            pairs = zip(*self.tok_encode_pair(prompt, doc.choices, pairwise=True), strict=True)
            # What is too long is cut on the left, as there.
            requests.append([(context[-max(1, self.max_length - len(after)) :], after) for context, after in pairs])
        answers = zip(requests, self._scores(requests), strict=True)
        return [_response(of_doc, [score.logprob for score in scores], scores) for of_doc, scores in answers]

    def loglikelihood_rolling(self, docs: list[Any]) -> list[Any]:
        """The log-likelihood of each whole text, in windows as long as the model reads, each after one token."""
        first = [self.tokenizer.bos_token_id or self.tokenizer.eos_token_id]
        texts = [first + self.tok_encode(doc.query, add_special_tokens=False) for doc in docs]
        starts = [range(0, len(text) - 1, self.max_length) for text in texts]
        requests = [
            [(text[at : at + 1], text[at + 1 : at + 1 + self.max_length]) for at in every]
            for text, every in zip(texts, starts, strict=True)
        ]
        answers = zip(requests, self._scores(requests), strict=True)
        return [_response(of_doc, [sum(score.logprob for score in scores)], scores) for of_doc, scores in answers]

    def _scores(self, requests: list[list[Request]]) -> list[list[Score]]:
        """Of each document's continuations; those of one context run together."""
        pairs = [(context, [after]) for of_doc in requests for context, after in of_doc]
        found = iter(self.attached.engine.score_many(pairs, progress=not self.disable_tqdm))
        self.attached.engine.flush()
        return [[next(found)[0] for _ in of_doc] for of_doc in requests]


def _response(requests: list[Request], logprobs: list[float], scores: list[Score]) -> Any:
    return ModelResponse(
        logprobs=logprobs,
        argmax_logits_eq_gold=[score.is_greedy for score in scores],
        input_tokens=requests[0][0] if requests else [],
        output_tokens=[after for _, after in requests],
    )


def _value(text: Any) -> Any:
    """A number or a truth value where it is written as one."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


if __name__ == "__main__":
    from lighteval.__main__ import app

    app(["custom", *sys.argv[1:2], __file__, *sys.argv[2:]])
