"""Against plain Transformers: time to the first token in a chat, over a code file, behind a system prompt.

The baseline is the same engine object in BASELINE mode, which is ``model.generate`` on the same tokens. Both
answer every request next to each other; the speed-up is taken pair by pair.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.common.measure import TextSource, add_model_arguments, bare_forward, first_token, load_engine, positive
from benchmarks.common.report import BenchError, Progress, Report
from kvboost.bench.report import Spread, Table, describe_machine, ratios, say
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode, GenerationResult

QUICK = {"repeat": 1, "turns": 2, "tokens": 400, "dtype": ["float32"], "chunk_size": 32}

_SYSTEM_TOKENS, _TURN_TOKENS, _REPLY_TOKENS, _QUERY_TOKENS = 250, 200, 24, 100
_QUESTIONS = (
    "\nQuestion: which exceptions can the code above raise, and when does it raise them?\nAnswer:",
    "\nQuestion: list the public functions of this file in one sentence each.\nAnswer:",
    "\nQuestion: where would you add a new option, and what else has to change?\nAnswer:",
    "\nQuestion: is there anything in this code that is not safe with threads?\nAnswer:",
    "\nQuestion: write a short test for the first class of the file.\nAnswer:",
)
_SHORT_QUESTIONS = (
    "What does the text above say about errors, and what should a caller do then?",
    "How many arguments does the first function take, and which of them are optional?",
    "Can the names in this text be changed later without breaking anything else?",
    "Which part of it would you explain first to somebody who is new here?",
    "Give one example of how it is used, with the values you would expect.",
    "Why is the order of the steps important, and what happens if it changes?",
)

Ask = Callable[[GenerationMode], GenerationResult]


@dataclass
class _Line:
    """One line of the table: the same request, several times."""

    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    baseline_ms: list[float] = field(default_factory=list)
    engine_ms: list[float] = field(default_factory=list)


class _Scores:
    """Asks engine and baseline in turn, and keeps what they took by line."""

    def __init__(self, progress: Progress) -> None:
        self.lines: dict[str, _Line] = {}
        self._progress = progress

    def pair(self, name: str, ask: Ask) -> GenerationResult:
        """One request, to both; the first to go changes from line to line and every time within a line."""
        modes = [GenerationMode.CHUNK_KV_REUSE, GenerationMode.BASELINE]
        line = self.lines.setdefault(name, _Line())
        turn = list(self.lines).index(name) + len(line.engine_ms)
        answers = {mode: ask(mode) for mode in (modes if turn % 2 else reversed(modes))}
        ours, theirs = (answers[mode] for mode in modes)
        if ours.prompt_token_ids != theirs.prompt_token_ids:
            raise BenchError(f"{name}: engine and baseline got different tokens; this is a defect of the benchmark")
        line.prompt_tokens.append(ours.prompt_tokens)
        line.cached_tokens.append(ours.cached_tokens)
        line.baseline_ms.append(theirs.ttft_ms)
        line.engine_ms.append(ours.ttft_ms)
        self._progress.step()
        return ours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser, dtypes=("float32", "bfloat16"))
    parser.add_argument("--repeat", type=positive, default=7, help="repetitions, each from an empty cache (default 7)")
    parser.add_argument("--turns", type=positive, default=8, help="turns of the chat (default 8)")
    parser.add_argument("--tokens", type=positive, default=2000, help="length of the code file (default 2000)")
    parser.add_argument("--chunking", choices=("content", "fixed"), default="content", help="default: content")
    parser.add_argument("--chunk-size", type=positive, default=128, help="default: 128")


def run(args: argparse.Namespace) -> Report:
    """Measure every dtype."""
    if args.tokens <= 2 * _QUERY_TOKENS:
        raise BenchError(f"--tokens {args.tokens} is too short to show anything; give more than {2 * _QUERY_TOKENS}")
    report = Report("ttft")
    for dtype in args.dtype:
        engine = load_engine(args, dtype=dtype, chunking=args.chunking, chunk_size=args.chunk_size)
        if getattr(engine.tokenizer, "chat_template", None) is None:
            raise BenchError("this model's tokenizer has no chat template; give --model a chat model")
        source = TextSource(engine.tokenizer, args.text)
        requests = args.turns + 2 * (1 + len(_QUESTIONS)) + len(_SHORT_QUESTIONS) + 1
        scores = _Scores(Progress(f"{dtype}, requests", requests * args.repeat))
        _warm_up(engine, source, args.tokens)
        floor: list[float] = []
        code = _code_file(engine, source, args.tokens)
        for repetition in range(args.repeat):
            _chat(engine, source, scores, turns=args.turns)
            _ask_about_code(engine, code, scores, boundary=False)
            _ask_about_code(engine, code, scores, boundary=True)
            _system_prompt(engine, source, scores)
            floor.append(_fixed_share(engine, source, scores, tokens=args.tokens, repetition=repetition))
        lines = scores.lines
        share = lines[_share_name(args.tokens)]
        lines[f"bare forward of {_QUERY_TOKENS} query tokens: the floor"] = _Line(
            share.prompt_tokens, share.cached_tokens, share.baseline_ms, floor
        )
        report.tables.append(_table(lines, args, dtype))
        report.raw[dtype] = {name: vars(line) for name, line in lines.items()}
    return report


def _warm_up(engine: KVBoost, source: TextSource, tokens: int) -> None:
    """Digest the weights, fault in the memory: what happens once per process."""
    say("warming up")
    ids = source.window(len(source.ids) // 2, tokens)
    for baseline in (False, True):
        first_token(engine, ids, baseline=baseline)
    engine.clear()


def _chat(engine: KVBoost, source: TextSource, scores: _Scores, *, turns: int) -> None:
    """A growing chat: every reply is appended to the history."""
    engine.clear()
    history = [{"role": "system", "content": source.words(0, _SYSTEM_TOKENS)}]
    for turn in range(turns):
        history.append({"role": "user", "content": source.words(1000 + turn * _TURN_TOKENS, _TURN_TOKENS)})
        reply = scores.pair(
            f"chat, turn {turn + 1}" + (" (cold)" if turn == 0 else ""),
            lambda mode: engine.chat(
                history, mode=mode, max_new_tokens=_REPLY_TOKENS, min_new_tokens=_REPLY_TOKENS, temperature=0
            ),
        )
        history.append({"role": "assistant", "content": reply.output_text})


def _code_file(engine: KVBoost, source: TextSource, tokens: int) -> tuple[str, int]:
    """A text of about ``tokens`` tokens that keeps its ids with a question behind it, and its exact length."""
    text = source.words(0, tokens).rstrip() + "\n"

    def ids(of: str) -> list[int]:
        return list(engine.tokenizer(of)["input_ids"])

    alone = ids(text)
    if any(ids(text + question)[: len(alone)] != alone for question in _QUESTIONS):
        raise BenchError("this tokenizer joins the end of the file with the question; give other text with --text")
    return text, len(alone)


def _ask_about_code(engine: KVBoost, code: tuple[str, int], scores: _Scores, *, boundary: bool) -> None:
    """Cold: file and question on an empty cache. Then the file is warmed and asked about."""
    text, length = code
    boundaries = [length] if boundary else []
    how = "code file, boundary given" if boundary else "code file, plain text"

    def ask(question: str) -> Ask:
        return lambda mode: engine.generate(
            text + question, mode=mode, boundaries=boundaries, max_new_tokens=1, temperature=0
        )

    engine.clear()
    scores.pair(f"{how} (cold)", ask(_QUESTIONS[0]))
    engine.clear()
    engine.warm(text, boundaries=boundaries)
    for number, question in enumerate(_QUESTIONS, start=1):
        scores.pair(f"{how}, question {number}", ask(question))


def _system_prompt(engine: KVBoost, source: TextSource, scores: _Scores) -> None:
    """A system prompt and short questions, one after the other, each a chat of its own."""
    engine.clear()
    system = {"role": "system", "content": source.words(0, _SYSTEM_TOKENS)}

    def ask(question: str) -> Ask:
        messages = [system, {"role": "user", "content": question}]
        return lambda mode: engine.chat(messages, mode=mode, max_new_tokens=1, temperature=0)

    for number, question in enumerate(_SHORT_QUESTIONS):
        scores.pair("system prompt, short question" + (" (cold)" if number == 0 else ""), ask(question))


def _share_name(tokens: int) -> str:
    return f"{(tokens - _QUERY_TOKENS) / tokens:.0%} reuse, {_QUERY_TOKENS} query tokens"


def _fixed_share(engine: KVBoost, source: TextSource, scores: _Scores, *, tokens: int, repetition: int) -> float:
    """A prompt of which all but the last tokens are stored. Returns the bare forward's milliseconds."""
    engine.clear()
    known = tokens - _QUERY_TOKENS
    head = source.window(0, known)
    engine.warm(head, boundaries=[known])
    # Other words behind the same head each time: chunks of an earlier tail must not be found.
    first_tail, tail = (source.window(tokens + (2 * repetition + i) * _QUERY_TOKENS, _QUERY_TOKENS) for i in range(2))
    first_token(engine, head + first_tail, boundaries=[known])  # brings the KV into the workspace
    result = scores.pair(
        _share_name(tokens),
        lambda mode: engine.generate(head + tail, mode=mode, boundaries=[known], max_new_tokens=1, temperature=0),
    )
    if result.cached_tokens != known:
        raise BenchError(f"{result.cached_tokens} tokens were reused instead of {known}; the text repeats itself")
    cache = engine.prefill(head + tail, boundaries=[known]).cache
    cache.crop(-_QUERY_TOKENS)
    forward = bare_forward(engine, tail, cache)
    forward()
    return forward()


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _table(lines: dict[str, _Line], args: argparse.Namespace, dtype: str) -> Table:
    table = Table(
        f"Against plain Transformers: time to first token, {args.chunking} chunks of {args.chunk_size}",
        describe_machine(dtype=dtype, model=str(args.model)),
        ["request", "prompt", "cached", "plain TTFT ms", "engine TTFT ms", "speed-up"],
    )
    for name, line in lines.items():
        table.add(
            name,
            _range(line.prompt_tokens),
            _range(line.cached_tokens),
            Spread.of(line.baseline_ms).text(0),
            Spread.of(line.engine_ms).text(0),
            Spread.of(ratios(line.baseline_ms, line.engine_ms)).text(2),
        )
    table.notes.append(
        f"speed-up = plain / engine, pair by pair; cells are median [min max] of {args.repeat} repetitions, each from "
        "an empty cache (short questions: all of them together). Both sides are timed from the call, so tokenizing "
        f"counts. `(cold)`: on an empty cache. Chat replies have exactly {_REPLY_TOKENS} greedy tokens. The last "
        "line has no engine in it: the model's forward of the query tokens alone, in one step, on KV already in place; "
        "content chunks may cut the same tokens into two steps, fixed ones of more than 100 tokens do not."
    )
    return table
