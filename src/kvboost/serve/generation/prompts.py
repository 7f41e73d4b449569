"""Chats to token ids: through the tokenizer's own template, with the ids of generated replies put back in.

Called by the endpoints that take messages, in a worker thread. A reply comes back in a chat as text. Tokenising that
text need not give the ids that were generated, and then none of their KV would be found: so the ids are remembered by
their text. Invariants: the ids decode to the text that the template wrote; where pieces tokenised one by one would not,
the text is tokenised as a whole. A tenant finds its own replies only, and all replies together take a bounded number of
bytes, keys counted.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import threading
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from kvboost.serve.errors import bad_request
from kvboost.serve.generation.turns import TenantMemory, Turn
from kvboost.serve.security.limits import PromptLengths

_MAX_LOST = 32  # messages that are not in the text; then the rest is not searched for either
_MIN_SPLICE = 4  # tokens of a reply's end; fewer are not worth a search
_Key = tuple[str, bytes]
_KEY_BYTES = 450  # a key, its entry and an empty array: most of what a short reply takes


@dataclass(frozen=True)
class Hold:
    """A beginning of a prompt that a client wants to find again."""

    tokens: int
    seconds: float
    name: str | None = None
    """The next one of this name replaces it. Without a name only one of the same tokens does."""


@dataclass(frozen=True)
class ChatPrompt:
    """A chat that is ready for its reply."""

    text: str
    token_ids: list[int]
    boundaries: list[int]
    tenant: str
    cache_key: str
    """Replies are remembered for this tenant and key only."""
    holds: tuple[Hold, ...] = ()
    """Up to the last positions that the client marked with ``cache_control``, of each time; the longest time last."""


def effort_variables(effort: str | None) -> dict[str, Any]:
    """What an effort of reasoning sets in a chat template; the second is for templates that know only on and off."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


_KWARG = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class ChatPrompts:
    """Renders and tokenises chats with one tokenizer. Thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        min_gap: int,
        lengths: PromptLengths | None = None,
        replies: ReplyMemory | None = None,
    ) -> None:
        """``lengths`` refuses a text that is too long, before it is tokenised."""
        self._tokenizer = tokenizer
        self._min_gap, self._lengths = min_gap, lengths or PromptLengths(tokenizer, None)
        self.replies = replies or ReplyMemory()
        self._lock = threading.Lock()
        self._is_shared = _can_be_shared(tokenizer)
        template = getattr(tokenizer, "chat_template", None)
        self._written = json.dumps(template) if template is not None else ""
        self.takes_tools = self.reads("tools")

    def in_use(self) -> AbstractContextManager[Any]:
        """Held while tokenising: some tokenizers can be used by one thread at a time only."""
        return nullcontext() if self._is_shared else self._lock

    def reads(self, variable: str) -> bool:
        """Whether the template mentions a variable."""
        return variable in self._written

    def check_kwargs(self, kwargs: Mapping[str, Any], *, param: str) -> None:
        """Refuse names that are no variables of a template: those that say how it is rendered, for example."""
        reserved = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        for name in kwargs:
            if _KWARG.fullmatch(name) is None or name in reserved:
                raise bad_request(f"{param} takes variables of the chat template, by names it may use", param=param)

    def encode(
        self,
        turns: Sequence[Turn],
        *,
        tenant: str,
        cache_key: str,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        param: str = "messages",
    ) -> ChatPrompt:
        """The chat's text, its ids and where to cut: at the ends of messages and parts, and where the client marked it.

        ``template_kwargs`` are further variables of the template, ``param`` is the field the chat came in.
        """
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise bad_request("this model has no chat template; use /v1/completions with the text you want")
        extra = {**(template_kwargs or {}), **({"tools": tools} if tools else {})}
        text = self.render([turn.fields for turn in turns], extra=extra, param=param)
        # With what the template wrote of calls and tools.
        self._lengths.check_text(text, param=param, in_use=self.in_use())
        splices, marks, ends = self._locate(turns, text, tenant=tenant, cache_key=cache_key)
        pieces = _Pieces(self._tokenize)
        with self.in_use():
            start, cuts = 0, deque(mark for mark, _ in marks)
            for found, ids, length in [*splices, (len(text), [], 0)]:
                while cuts and cuts[0] < found:
                    if (cut := cuts.popleft()) > start:
                        pieces.add_text(text[start:cut])
                        start = cut
                pieces.add_text(text[start:found])
                pieces.add_ids(ids, length)
                start = found + length
            if splices or marks:  # tokenizers that write a space before every piece would change the text
                whole = _Pieces(self._tokenize)
                whole.add_text(text)
                if self._decode(pieces.ids) != self._decode(whole.ids):
                    pieces = whole
        wanted = [(mark, 1) for mark, _ in marks] + [(end, self._min_gap) for end in ends]
        last: dict[int, int] = {}  # ids up to the last mark, by its seconds
        for mark, seconds in marks:
            last[seconds] = max(last.get(seconds, 0), pieces.ids_up_to(mark) or 0)
        holds = tuple(Hold(count, seconds) for seconds, count in sorted(last.items()) if count)
        return ChatPrompt(text, pieces.ids, _spaced(pieces, wanted), tenant, cache_key, holds)

    def remember(self, prompt: ChatPrompt, *, reply: str, ids: Sequence[int], shown: Sequence[str] = ()) -> None:
        """Keep the ids of a reply, if they are its text and nothing else.

        ``shown`` are the parts of it that the client was given, and will send back: their ids are kept, too.
        """
        kept: list[tuple[str, Sequence[int]]] = [(reply, ids)]
        if self._decode(ids) != reply:
            return
        for part in shown:
            if part not in ("", reply) and (own := self._ids_of(part, reply, ids)):
                kept.append((part, own))
        for text, own in kept:
            self.replies.remember(
                tenant=prompt.tenant, cache_key=prompt.cache_key, before=prompt.text, reply=text, ids=own
            )

    def _ids_of(self, part: str, reply: str, ids: Sequence[int]) -> Sequence[int]:
        """Those of ``ids``, the text ``reply``, that are exactly ``part``; none if an id crosses its border."""
        at = reply.find(part)
        start, end = (
            bisect_left(range(len(ids)), border, key=lambda count: len(self._decode(ids[:count])))
            for border in (at, at + len(part))
        )
        return ids[start:end] if at >= 0 and self._decode(ids[start:end]) == part else []

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ``ids``, with special tokens written out or left out."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self.decode(ids, special=True)

    def _tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """Ids, and the end of each in characters (nothing where the tokenizer does not say)."""
        if not getattr(self._tokenizer, "is_fast", False):
            return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]], []
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [int(i) for i in encoded["input_ids"]], [end for _, end in encoded["offset_mapping"]]

    def render(self, messages: list[dict[str, Any]], *, extra: Mapping[str, Any], param: str) -> str:
        """The text of a chat that is ready for its reply; ``extra`` are further variables of the template."""
        from jinja2 import TemplateError

        try:
            text = str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **extra)
            )
            text.encode()  # arguments of earlier calls can hold half of a surrogate pair, which no tokenizer reads
            return text
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
            message = f"this model's chat template does not take these messages: {error}"
            raise bad_request(message, param=param) from error

    def _locate(
        self, turns: Sequence[Turn], text: str, *, tenant: str, cache_key: str
    ) -> tuple[list[tuple[int, list[int], int]], list[tuple[int, int]], list[int]]:
        """Where known replies are (position, ids, characters), where clients marked a cut, and where messages end.

        Each message is searched for after the one before. One that is found too early, in another's words, only costs a
        hit: the ids put in always decode to the text at that position.
        """
        splices: list[tuple[int, list[int], int]] = []
        marks: list[tuple[int, int]] = []
        ends: list[int] = []
        position = lost = 0
        before = TextBefore(text)
        for turn in turns:
            if turn.reasoning and (found := text.find(turn.reasoning, position)) >= 0:
                ids = self.replies.find(tenant=tenant, cache_key=cache_key, before="", reply=turn.reasoning)
                position = found + len(turn.reasoning)
                if ids is not None:
                    splices.append((found, ids, len(turn.reasoning)))
            content = turn.content
            found = text.find(content, position) if content else -1
            if turn.fields["role"] == "assistant" and content:
                before.grow(max(found, 0))
                ids = self.replies.find(tenant=tenant, cache_key=cache_key, before=before, reply=content)
                if ids is not None and found < 0:  # a template that cuts earlier replies
                    found, ids = self._longest_suffix(ids, text, position)
                if ids is not None and found >= 0:
                    length = len(self._decode(ids))
                    splices.append((found, ids, length))
                    position = found + length
                    marks += [(min(found + mark, position), seconds) for mark, seconds in turn.marks]
                    ends.append(position)
                    continue
            # A message that the template rewrites is searched for up to the end: many of them would take seconds.
            lost += bool(content) and found < 0
            if lost > _MAX_LOST:
                break
            if found >= 0:
                marks += [(found + mark, seconds) for mark, seconds in turn.marks]
                position = found + len(content)
                ends += [*(found + end for end in turn.ends), position]
        return splices, marks, ends

    def _longest_suffix(self, ids: list[int], text: str, position: int) -> tuple[int, list[int] | None]:
        """The longest suffix of ``ids`` whose text is in ``text`` after ``position``, and where."""
        low, high = 0, max(0, len(ids) - _MIN_SPLICE)  # a shorter suffix is found wherever a longer one is
        if high == 0 or text.find(self._decode(ids[high:]), position) < 0:
            return -1, None
        while low < high:
            middle = (low + high) // 2
            if text.find(self._decode(ids[middle:]), position) >= 0:
                high = middle
            else:
                low = middle + 1
        return text.find(self._decode(ids[high:]), position), ids[high:]


def _can_be_shared(tokenizer: Any) -> bool:
    """Whether threads may tokenise at once: with a fast tokenizer that calls as ours are leave as it is.

    A call that has to change how it pads or truncates cannot run beside another one.
    """
    if not getattr(tokenizer, "is_fast", False):
        return False
    tokenizer("x", add_special_tokens=False)  # the first one changes it, if any does
    inner = tokenizer.backend_tokenizer
    return inner.truncation is None and inner.padding is None


class _Pieces:
    """Ids of a text that is joined from pieces, and where in the text each id ends, as far as that is known."""

    def __init__(self, tokenize: Any) -> None:
        self._tokenize = tokenize
        self.ids: list[int] = []
        self._characters = 0
        self._ends: list[int] = []  # characters, ascending
        self._counts: list[int] = []  # ids up to there

    def add_text(self, text: str) -> None:
        """Tokenise one more piece."""
        if not text:
            return
        ids, ends = self._tokenize(text)
        if ends:
            self._ends += [self._characters + end for end in ends]
            self._counts += range(len(self.ids) + 1, len(self.ids) + len(ids) + 1)
        self._grow(ids, len(text))

    def add_ids(self, ids: Sequence[int], characters: int) -> None:
        """Append ids that are the text of the next ``characters`` characters."""
        if ids:
            self._grow(ids, characters)

    def _grow(self, ids: Sequence[int], characters: int) -> None:
        self.ids += ids
        self._characters += characters
        if ids and (not self._counts or self._counts[-1] != len(self.ids)):
            self._ends.append(self._characters)
            self._counts.append(len(self.ids))

    def ids_over(self, character: int) -> int | None:
        """How many ids it takes to write the first ``character`` characters; None if there are fewer."""
        index = self._last(character)
        return self._counts[index] if index < len(self._ends) else None

    def ids_up_to(self, character: int) -> int | None:
        """How many ids are exactly the first ``character`` characters; None where an id crosses that border."""
        index = self._last(character)
        return self._counts[index] if index < len(self._ends) and self._ends[index] == character else None

    def _last(self, character: int) -> int:
        """The last id that ends there, else the first that ends later."""
        index = bisect_left(self._ends, character)
        while index + 1 < len(self._ends) and self._ends[index + 1] == character:
            index += 1
        return index


def _spaced(pieces: _Pieces, wanted: Sequence[tuple[int, int]]) -> list[int]:
    """Positions in ids of the wanted cuts (characters, minimum distance to the one before), ascending."""
    chosen: list[int] = []
    for character, gap in sorted(wanted):
        count = pieces.ids_over(character)
        if count is not None and count > 0 and count - (chosen[-1] if chosen else 0) >= gap:
            chosen.append(count)
    return chosen


class ReplyMemory(TenantMemory["array[int]"]):
    """The ids of replies by tenant, cache key and text; those that nobody asked for go first."""

    def __init__(self, max_bytes: int = 16 * 2**20) -> None:
        super().__init__(max_bytes)

    def remember(self, *, tenant: str, cache_key: str, before: str, reply: str, ids: Sequence[int]) -> None:
        """Keep the ids of ``reply``, which was generated after the rendered text ``before``."""
        kept = array("I", ids)
        nbytes = _KEY_BYTES + kept.itemsize * len(kept)
        if reply and ids and 2 * nbytes <= self._max_bytes:
            self.keep(tenant, _keys(cache_key, before, reply), kept, nbytes)  # hashed before all others wait

    def find(self, *, tenant: str, cache_key: str, before: str | TextBefore, reply: str) -> list[int] | None:
        """The ids of ``reply`` after exactly this text, else after any other; None if it was not generated here."""
        found = self.look_up(tenant, _keys(cache_key, before, reply), renew=True)
        return list(found[0]) if found is not None else None


class TextBefore:
    """The beginning of a text, which grows: so a chat's turn is hashed once, and not for every turn after it."""

    def __init__(self, text: str) -> None:
        self._text, self._end = text, 0
        self._digest = hashlib.sha256()

    def grow(self, end: int) -> None:
        """It goes up to this character now; a smaller one than before changes nothing."""
        self._digest.update(self._text[self._end : end].encode())
        self._end = max(self._end, end)

    def digest(self, suffix: bytes) -> bytes:
        """Of the text so far and ``suffix``."""
        digest = self._digest.copy()
        digest.update(suffix)
        return digest.digest()


def _keys(cache_key: str, before: str | TextBefore, reply: str) -> tuple[_Key, _Key]:
    own = hashlib.sha256(reply.encode()).digest()
    if isinstance(before, str):
        text, before = before, TextBefore(before)
        before.grow(len(text))
    return (cache_key, before.digest(b"\0" + own)), (cache_key, own)
