"""``kvboost.attach``: a model's own ``generate`` reuses KV, for programs that know nothing of KVBoost.

Called by users. The engine prefills what is not stored; Transformers goes on from there with the caller's arguments.
Invariants: ``generate`` keeps its signature, its return type and its tokens (up to rounding); what cannot be reused is
passed on untouched; KV is never approximate unless the settings ask for it.
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import partial, update_wrapper
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch

from kvboost.core.costs import StageClock
from kvboost.core.prefill import Prefiller, finish_together
from kvboost.core.session import Session
from kvboost.core.state import PrefillState
from kvboost.engine.engine import KVBoost
from kvboost.engine.single import Request
from kvboost.errors import CapacityError, ConfigError, MovedModelError
from kvboost.hf.adapters import AS_SET
from kvboost.hf.cache import SlabCache
from kvboost.hf.generate import (
    PREPARED,
    check_allowed,
    end_token_ids,
    has_dropout,
    new_tokens_of,
    own_generate,
    pad_token_id,
    positional_arguments,
    reads_prompt_again,
    setting,
    with_padding,
)
from kvboost.hf.runner import in_this_thread
from kvboost.types import GenerationMode

_log = logging.getLogger(__name__)
_MOST = 4096  # tokens of prompts that are prefilled together, what is known of them included
_CAPACITY_AHEAD = 1024  # new tokens that a batch's cache has room for; more make it grow


def attach(model: Any, tokenizer: Any = None, **settings: Any) -> Attached:
    """Let ``model.generate`` reuse the KV of what the model has read before. The settings are those of KVBoost.

    The script stays as it is: rows of a left-padded batch, several sequences per prompt, beams, samplers, streamers,
    stopping criteria and assisted decoding work as before, and give what they gave. What has no KV to reuse
    (``inputs_embeds``, a cache of the caller's, images) is passed on untouched. The engine is at ``model.kvboost``.
    ``detach()``, or leaving the ``with`` block, gives the model its own ``generate`` back and closes the engine.
    """
    if getattr(getattr(model, "kvboost", None), "model", None) is model:  # a copy of an attached model is not attached
        raise ConfigError("this model is attached already; its engine is model.kvboost, and detach() ends that")
    return Attached(KVBoost(model, tokenizer, **settings))


class Attached:
    """A model whose ``generate`` reuses KV."""

    def __init__(self, engine: KVBoost) -> None:
        self.engine, self._model = engine, engine.model
        self._before, self._ours = vars(self._model).get("generate"), _Generate(engine)
        self._model.kvboost = engine
        self._model.generate = self._ours

    def detach(self) -> None:
        """Give the model its own ``generate`` back, and close the engine. Harmless the second time."""
        if vars(self._model).get("kvboost") is not self.engine:
            return
        del self._model.kvboost
        if vars(self._model).get("generate") is self._ours:  # else somebody has put another over it: it stays
            if self._before is None:
                del self._model.generate
            else:
                self._model.generate = self._before
        self.engine.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()


class _Rows(NamedTuple):
    """The prompts of one call."""

    tokens: list[list[int]]
    """Without padding."""
    padded: int
    """Tokens of each with it."""


class _Generate:
    """Stands in for a model's ``generate``."""

    def __init__(self, engine: KVBoost) -> None:
        self.beneath: Any = engine.model.generate
        """The model's own."""
        self._engine, self._model = engine, engine.model
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._joint_failed = False
        """Whether prompts of a batch could not be prefilled together."""
        self._beneath_forward: tuple[Any, tuple[torch.dtype, bool]] | None = None
        """A forward that was set on the model, the autocast it is called in, and the one in which it computes."""
        update_wrapper(self, self.beneath)
        self.__signature__ = signature(self.beneath)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model has its own ``generate``: the engine knows nothing of its weights."""
        copied = memo.get(id(self._model))
        return MethodType(type(copied).generate, copied) if copied is not None else self.beneath

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine.parts.closed:
            return self.beneath(*args, **kwargs)
        arguments = positional_arguments(args) | kwargs
        rows, options, reason = self._rows_and_options(arguments)
        if rows is not None:
            session, reason = self._engine.parts.generator.usable(self._engine.session, [], GenerationMode.PREFIX_CACHE)
            longest = max(rows.tokens, key=len)
            if session is not None:
                reason = session.refusal(len(longest)) or self._why_not(rows, options)
            if session is not None and reason is None:
                try:
                    with self._autocast():
                        if len(rows.tokens) == 1 and len(longest) == rows.padded:
                            return self._single(session, longest, options)
                        return self._together(session, rows, arguments, options)
                # Both are raised before anything is computed.
                except CapacityError as error:
                    reason = str(error)
                except MovedModelError as error:
                    self._pass_on(str(error), level=logging.WARNING)
        self._pass_on(reason)
        return self.beneath(*args, **kwargs)

    def _pass_on(self, reason: str | None, *, level: int = logging.INFO) -> None:
        """Say once why a call reuses nothing."""
        with self._lock:
            if reason is None or reason in self._said:
                return
            self._said.add(reason)
        _log.log(level, "kvboost: generate runs without reuse: %s", reason)

    def _rows_and_options(self, arguments: dict[str, Any]) -> tuple[_Rows | None, dict[str, Any], str | None]:
        """The prompts and all other arguments, or why the prompts cannot be told."""
        options = dict(arguments)
        given = [prompts for name in ("inputs", "input_ids") if (prompts := options.pop(name, None)) is not None]
        mask = options.pop("attention_mask", None)
        for name in PREPARED:  # given, and not used
            if options.get(name, 0) is (True if name == "use_cache" else None):
                del options[name]
        if len(given) != 1 or not isinstance(given[0], torch.Tensor) or given[0].dim() != 2:
            return None, options, "the prompts are not given as one tensor of token ids"
        ids = given[0]
        if ids.is_floating_point() or not ids.numel():
            return None, options, "the prompts are not token ids"
        try:
            check_allowed(options)
        except ConfigError as error:
            return None, options, str(error)
        if mask is None:
            pad = pad_token_id(self._model, options)
            # A token that pads and ends, as in many chats, is not taken for padding by Transformers either.
            if pad is not None and pad not in end_token_ids(self._model, options) and bool((ids == pad).any()):
                return None, options, "its padding is not told by an attention_mask"
            return _Rows(ids.tolist(), ids.shape[1]), options, None
        if mask.shape != ids.shape or not bool(mask[:, -1].all()) or bool((mask.long().diff(dim=1) < 0).any()):
            return None, options, "its attention_mask hides more than padding on the left"
        lengths = mask.long().sum(dim=1).tolist()
        return _Rows([row[-n:] for row, n in zip(ids.tolist(), lengths, strict=True)], ids.shape[1]), options, None

    def _why_not(self, rows: _Rows, options: dict[str, Any]) -> str | None:
        """Why this call cannot go on from a cache and give what it would; None if it can."""
        model, layout = self._model, self._engine.parts.layout
        if new_tokens_of(model, options, prompt_tokens=rows.padded) < 1:
            return "its max_length leaves no new token"
        for name in ("output_attentions", "output_hidden_states", "token_healing"):
            if setting(model, options, name):
                return f"{name} is about the whole prompt"
        if setting(model, options, "use_cache") is False:
            return "use_cache is False"
        if "prepare_inputs_for_generation" in vars(model):
            return "somebody prepares its inputs otherwise, as PEFT's prompt tuning does"
        if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            return "gradient checkpointing keeps no cache"
        if model.training and has_dropout(model):
            return "dropout changes the prompt's KV in every call; set it to 0, or call model.eval()"
        if isinstance(self.beneath, partial):
            return "its repository has a generate of its own"
        if reason := reads_prompt_again(model, options):
            return reason
        alone = len(rows.tokens) == 1 and len(rows.tokens[0]) == rows.padded
        copies = self._engine.parts.generator.copies(options)
        if layout is None or (layout.indexed and not (alone and copies == 1)):
            return "a step of several sequences chooses other positions in its sparse attention"
        if alone:
            return None
        if layout.states:
            return "padded prompts of a model with recurrent layers are not put together in a cache"
        return None

    def _autocast(self) -> AbstractContextManager[Any]:
        """The autocast of a forward that was set on the model, as accelerate's: the engine computes beneath it."""
        if (forward := vars(self._model).get("forward")) is None:
            return nullcontext()
        runner, kind = self._engine.parts.runner, self._engine.parts.runner.device.type

        def now() -> tuple[torch.dtype, bool]:
            return torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

        asked, known = (forward, now()), self._beneath_forward
        if known is None or known[0] != asked:
            seen: list[tuple[torch.dtype, bool]] = []
            hook = in_this_thread(lambda *_: seen.append(now()))
            with self._model.get_input_embeddings().register_forward_pre_hook(hook):
                runner.decode(0, None)
            known = self._beneath_forward = asked, seen[0]
        return torch.autocast(kind, *known[1])

    def _single(self, session: Session, tokens: list[int], options: dict[str, Any]) -> Any:
        """One prompt, as the engine generates."""
        options["max_new_tokens"] = new_tokens_of(self._model, options, prompt_tokens=len(tokens))
        options.pop("max_length", None)
        request = Request(tokens, (), options)
        generator = self._engine.parts.generator
        with self._engine.parts.running(AS_SET):
            return generator.run(session, request, GenerationMode.CHUNK_KV_REUSE, StageClock()).raw

    def _together(self, session: Session, rows: _Rows, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
        """Several prompts: each different one is prefilled once, up to its last token, which Transformers computes."""
        generator, layout = self._engine.parts.generator, self._engine.parts.layout
        assert layout is not None
        copies = generator.copies(options)
        count = new_tokens_of(self._model, options, prompt_tokens=rows.padded)
        session.budget.check(rows.padded + count, sequences=copies * len(rows.tokens), why="they are one batch")
        with self._engine.parts.running(AS_SET):
            cache = SlabCache(layout, capacity=rows.padded + min(count, _CAPACITY_AHEAD), batch=len(rows.tokens))
            places: dict[tuple[int, ...], list[int]] = {}
            for row, tokens in enumerate(rows.tokens):
                places.setdefault(tuple(tokens), []).append(row)
            self._fill(session.prefiller, places, cache, end=rows.padded - 1)
            cache.set_length(rows.padded - 1)
            if copies > 1:
                cache.batch_repeat_interleave(copies)
            given = {**arguments, "past_key_values": cache, "cache_implementation": None}
            return own_generate(self._model)(**with_padding(self._model, given))

    def _fill(
        self, prefiller: Prefiller, places: dict[tuple[int, ...], list[int]], cache: SlabCache, *, end: int
    ) -> None:
        """Put the KV of each prompt, but for its last token, into its rows, where it ends at ``end``.

        On an accelerator short prompts share forwards, but for the first one: what it has in common with others is
        computed once. On a CPU a forward costs little beside its tokens.
        """
        parts = self._engine.parts
        joins = parts.runner.joins and not self._joint_failed and len(places) > 2
        joint = parts.batches.joint_prefill if joins else None
        most = min(_MOST, prefiller.rule.max_tokens)
        waiting: list[tuple[PrefillState, list[int]]] = []

        def put(count: int) -> None:
            """The first ``count`` of those that wait."""
            if joint is not None and count > 1 and not self._joint_failed:
                try:
                    finish_together(joint.append, [state for state, _ in waiting[:count]], leave=1)
                except Exception as error:  # noqa: BLE001 - whatever it is, each of them is computed alone
                    self._joint_failed = True
                    _log.warning("prompts of batches are prefilled one by one: a joint step failed: %r", error)
            for _ in range(count):
                state, rows = waiting[0]
                last = len(state.tokens) - 1
                prefiller.advance(state, to=last)
                prefiller.commit(state)
                for row in rows if last else ():
                    cache.place(end - last, state.cache.span(0, last), row=row)
                waiting.pop(0)[0].close()

        try:
            for number, (tokens, rows) in enumerate(places.items()):
                if sum(len(state.tokens) for state, _ in waiting) + len(tokens) > most:
                    put(len(waiting))  # whatever is known of them: each has a cache of its own
                state = prefiller.open(list(tokens))
                waiting.append((state, rows))
                fits = state.num_computed < len(tokens) - 1 and state.step_end(len(tokens)) == len(tokens)
                if joint is None or number == 0 or not fits or len(tokens) > most:
                    put(len(waiting) - 1)
                    put(1)
            put(len(waiting))
        finally:
            for state, _ in waiting:
                state.close()
