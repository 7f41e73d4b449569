from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import CapacityError, ConfigError, GenerationMode, KVBoost
from kvboost.core.prefill import Prefiller
from kvboost.core.state import PrefillState
from kvboost.core.verify import same_bits
from kvboost.errors import ClosedError
from kvboost.hf.cache import SlabCache
from kvboost.hf.probe import probe_model
from kvboost.hf.sampling import Sampling
from kvboost.scheduler.forwards import JobDecoder
from kvboost.scheduler.jobs import Finished, Job, NewToken, RunnerLoad, Sampler, Ticket
from kvboost.scheduler.loop import JobLoop
from kvboost.scheduler.runner import BatchRunner
from kvboost.scheduler.sequence import RunningJob
from tests.helpers.models import FAMILIES

_TEXT = torch.randint(3, 97, (300,), generator=torch.Generator().manual_seed(7)).tolist()
_PROMPTS = [_TEXT[:60], _TEXT[:5], [*_TEXT[:40], 9, 9], [11], _TEXT[:48], _TEXT[100:170]]
_NOTHING = RunnerLoad(running=0, waiting=0, cached_bytes=0)


def job(tokens: Sequence[int], new: int = 8, **fields: Any) -> Job:
    return Job(token_ids=tuple(tokens), max_new_tokens=new, **fields)


def ids(events: Sequence[NewToken | Finished]) -> tuple[int, ...]:
    return tuple(event.token_id for event in events if isinstance(event, NewToken))


def end(events: Sequence[NewToken | Finished]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
    return last


def run(runner: BatchRunner, jobs: Sequence[Job]) -> list[list[NewToken | Finished]]:
    return [list(ticket.events()) for ticket in [runner.submit(one) for one in jobs]]


def engine_of(model: Any, **settings: Any) -> KVBoost:
    return KVBoost(model, None, **{"chunk_size": 8, "chunking": "fixed", **settings})


def alone(engine: KVBoost, tokens: Sequence[int], new: int = 8) -> tuple[int, ...]:
    wanted = {"max_new_tokens": new, "temperature": 0, "eos_token_id": None, "pad_token_id": 0}
    return engine.generate(list(tokens), mode=GenerationMode.BASELINE, **wanted).token_ids


def settled(engine: KVBoost, runner: BatchRunner) -> bool:
    return (
        replace(runner.load(), failure=None, step_seconds=0.0, one_by_one=False, preempted=0) == _NOTHING
        and engine._store.stats().leased == 0
    )


class Watched:
    """Notes what the model computes, in order: ('read', rows), of more than one, and ('decode', jobs)."""

    def __init__(self, engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[tuple[str, int]] = []
        runner = engine.parts.runner
        append, run_batch, run_rows = runner.append, runner.run_batch, runner.run_rows

        def reads(tokens: Any, cache: Any, *, logits: bool) -> Any:
            self.did.append(("read", len(tokens)) if len(tokens) > 1 else ("decode", 1))
            return append(tokens, cache, logits=logits)

        def decodes(tokens: Any, cache: Any, **inputs: Any) -> Any:
            self.did.append(("decode", len(tokens)))
            return run_batch(tokens, cache, **inputs)

        def reads_together(tokens: Any, cache: Any, last: torch.Tensor, **inputs: Any) -> Any:
            rows = torch.diff(last, prepend=torch.tensor([-1]))
            self.did.append(("read", int(rows[rows > 1].sum())))
            return run_rows(tokens, cache, last, **inputs)

        monkeypatch.setattr(runner, "append", reads)
        monkeypatch.setattr(runner, "run_rows", reads_together)
        monkeypatch.setattr(runner, "run_batch", decodes)

    def rows_read(self) -> int:
        return sum(count for what, count in self.did if what == "read")


@pytest.mark.parametrize(
    ("family", "deterministic"), [*((family, False) for family in FAMILIES), ("llama", True), ("gemma3_text", True)]
)
def test_every_job_says_what_it_says_alone(family: str, deterministic: bool, tiny: Callable[..., Any]) -> None:
    engine = engine_of(tiny(family))
    with BatchRunner(engine, deterministic=deterministic) as runner:
        found = run(runner, [job(tokens) for tokens in _PROMPTS])
        assert [ids(events) for events in found] == [alone(engine, tokens) for tokens in _PROMPTS]
        assert [end(events).reason for events in found] == ["length"] * len(found)
        assert settled(engine, runner)
        # Older Transformers run gemma2 through the kernel, without its soft cap.
        through_the_kernel = engine.model.config._attn_implementation != "eager"
        assert (runner.single_decode_reason is None) == (not deterministic and through_the_kernel)


def test_jobs_join_and_leave_at_every_step(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny("llama"))
    with BatchRunner(engine) as runner:
        watched = Watched(engine, monkeypatch)
        tickets: list[Ticket] = []

        def one_more(tokens: list[int], logits: torch.Tensor) -> None:
            if len(tokens) % 2 == 0 and len(tickets) < 10:  # the first job invites another at every second token
                tickets.append(runner.submit(job(_TEXT[len(tickets) : len(tickets) + 20], 3 + len(tickets))))

        first = list(runner.submit(job(_TEXT[:30], 40, constrain=one_more)).events())
        others = [list(ticket.events()) for ticket in tickets]
    assert len(ids(first)) == 40
    assert [ids(events) for events in others] == [alone(engine, _TEXT[i : i + 20], 3 + i) for i in range(10)]
    sizes = [count for what, count in watched.did if what == "decode"]
    assert len({*sizes}) > 3, "the batch grew and shrank"
    assert first[0] == NewToken(ids(first)[0])


def test_a_long_prompt_holds_streams_up_for_one_step_at_most(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny("llama"))
    with BatchRunner(engine, chunk_budget=8) as runner:
        watched = Watched(engine, monkeypatch)
        started = threading.Event()
        stream = runner.submit(job(_TEXT[200:205], 60, constrain=lambda tokens, logits: started.set()))
        started.wait(10)
        late = list(runner.submit(job(_TEXT[:197], 2)).events())
        list(stream.events())
    assert ids(late) == alone(engine, _TEXT[:197], 2)
    begin = next(i for i, did in enumerate(watched.did) if did == ("read", 8))
    reads = [i for i, did in enumerate(watched.did) if did[0] == "read"]
    assert len([i for i in reads if i >= begin]) == 25
    assert all(watched.did[i + 1][0] == "decode" for i in reads), "a decode step after every prefill step"


def test_short_prompts_read_several_in_a_step_within_the_budget(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny("llama"), chunk_size=64)
    with BatchRunner(engine, chunk_budget=12) as runner:
        watched = Watched(engine, monkeypatch)
        run(runner, [job(_TEXT[i : i + 5], 40) for i in range(8)])
    between: list[int] = [0]
    for what, count in watched.did:
        between = [*between, 0] if what == "decode" else [*between[:-1], between[-1] + count]
    assert max(between) == 10, "two of five tokens each"


def test_a_shared_beginning_is_read_once(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny("llama"))
    with BatchRunner(engine) as runner:
        watched = Watched(engine, monkeypatch)
        found = run(runner, [job([*_TEXT[:64], 3 + i, 7]) for i in range(6)])
    assert watched.rows_read() == 64 + 6 * 2
    reports = [end(events).report for events in found]
    assert [report.exact_tokens for report in reports if report] == [0, 64, 64, 64, 64, 64]
    assert all(report is not None and report.bitwise for report in reports)
    assert [ids(events) for events in found] == [alone(engine, [*_TEXT[:64], 3 + i, 7]) for i in range(6)]


def test_what_cannot_be_stored_is_read_by_each(tiny: Callable[..., Any]) -> None:
    engine = engine_of(tiny("llama"), cache_bytes=0)
    with BatchRunner(engine) as runner:
        found = run(runner, [job([*_TEXT[:64], 3 + i]) for i in range(4)])
    assert [ids(events) for events in found] == [alone(engine, [*_TEXT[:64], 3 + i]) for i in range(4)]


def test_cancelling_gives_everything_back_within_one_step(tiny: Callable[..., Any]) -> None:
    """At every phase: waiting, reading, decoding. The survivor, on the model's own thread, cancels and then looks."""
    engine = engine_of(tiny("llama"))
    engine.warm(_TEXT[:64])  # so that the victim holds a lease
    for phase in ("waiting", "reading", "decoding"):
        with BatchRunner(engine, max_running=1 if phase == "waiting" else 2, chunk_budget=8) as runner:
            victim: list[Ticket] = []
            held: list[tuple[int, int, int]] = []

            def watch(
                tokens: list[int],
                logits: torch.Tensor,
                phase: str = phase,
                runner: BatchRunner = runner,
                victim: list[Ticket] = victim,
                held: list[tuple[int, int, int]] = held,
            ) -> None:
                load, leased = runner.load(), engine._store.stats().leased
                held.append((load.running + load.waiting, load.cached_bytes, leased))
                if len(tokens) == 1:
                    # A warm beginning and, to be caught reading, a long cold rest.
                    rest = _TEXT[70:190] if phase == "reading" else []
                    victim.append(runner.submit(job([*_TEXT[:64], *rest, 5], 60)))
                if len(tokens) == 5:
                    victim[0].cancel()

            events = list(runner.submit(job(_TEXT[250:255], 9, constrain=watch)).events())
            gone = list(victim[0].events())
            assert ids(events) == alone(engine, _TEXT[250:255], 9)
            assert end(gone).reason == "cancelled"
            assert (len(gone) > 1) == (phase == "decoding")
            assert held[5][0] == 2, phase
            if phase != "waiting":
                assert held[5][2] > 0, phase
            assert held[7][0] == 1, phase
            assert held[7][1:] == held[1][1:], phase
            victim[0].cancel()  # harmless
        assert settled(engine, runner)


def test_preempted_jobs_make_room_and_go_on(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for deterministic in (False, True):
        engine = engine_of(tiny("llama"))
        with BatchRunner(engine, max_running=2, max_wait_steps=4, deterministic=deterministic) as runner:
            preempted = _count_preemptions(runner, monkeypatch)
            jobs = [job(_TEXT[i : i + 20 + i], 16, top_logprobs=0) for i in range(4)]
            found = run(runner, jobs)
            assert settled(engine, runner)
            assert runner.load().preempted == len(preempted)
        assert len(preempted) >= 2
        times = [end(events) for events in found]
        assert all(0 <= one.queued_seconds < one.first_token_seconds < one.seconds for one in times)
        assert max(one.queued_seconds for one in times[2:]) > max(one.queued_seconds for one in times[:2])
        assert [ids(events) for events in found] == [alone(engine, one.token_ids, 16) for one in jobs]
        assert all(end(events).report is not None for events in found)
        if deterministic:
            with BatchRunner(engine_of(tiny("llama")), deterministic=True) as calm:
                assert [run(calm, [one])[0][:-1] for one in jobs] == [events[:-1] for events in found]


def _count_preemptions(runner: BatchRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    preempted: list[int] = []
    preempt = runner._loop.scheduler.preempt

    def count() -> int | None:
        number = preempt()
        if number is not None:
            preempted.append(number)
        return number

    monkeypatch.setattr(runner._loop.scheduler, "preempt", count)
    return preempted


def test_deterministic_jobs_give_the_same_bytes_alone_and_among_fifteen(tiny: Callable[..., Any]) -> None:
    wanted = job(_TEXT[:53], 12, sampling=Sampling(temperature=0.8, top_p=0.9, seed=5), top_logprobs=3)
    chance = random.Random(4)
    with BatchRunner(engine_of(tiny("llama")), deterministic=True) as runner:
        expected = run(runner, [wanted])[0][:-1]
    for _ in range(2):
        engine = engine_of(tiny("llama"))
        with BatchRunner(engine, deterministic=True) as runner:
            others = [job(_TEXT[: chance.randrange(1, 120)], chance.randrange(1, 16)) for _ in range(15)]
            place = chance.randrange(16)
            found = run(runner, [*others[:place], wanted, *others[place:]])
            assert found[place][:-1] == expected, "tokens and log-probabilities, to the last bit"


def test_deterministic_bits_are_those_of_generate(tiny: Callable[..., Any]) -> None:
    engine = engine_of(tiny("llama"))
    with BatchRunner(engine, deterministic=True) as runner:
        found = run(runner, [job(tokens, 6, top_logprobs=0) for tokens in _PROMPTS])
    for tokens, events in zip(_PROMPTS, found, strict=True):
        settings = {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None, "pad_token_id": 0}
        raw = engine.generate(tokens, max_new_tokens=6, temperature=0, **settings).raw
        said = [float(step[0].log_softmax(-1).max()) for step in raw.logits]
        assert [event.logprob for event in events[:-1] if isinstance(event, NewToken)] == said


def test_deterministic_refuses_what_would_make_answers_depend_on_the_store(tiny: Callable[..., Any]) -> None:
    for settings in ({"reuse_generated": True}, {"kv_cache_bits": 8}, {"numerics": "fast"}):
        with pytest.raises(ConfigError, match="deterministic"):
            BatchRunner(engine_of(tiny("llama"), **settings), deterministic=True)


def test_new_tokens_are_kept_as_the_engine_keeps_them(tiny: Callable[..., Any]) -> None:
    for reuse in (False, True):
        engine = engine_of(tiny("llama"), reuse_generated=reuse)
        with BatchRunner(engine) as runner:
            first = run(runner, [job(_TEXT[:30], 25), job(_TEXT[50:60], 25)])[0]
            chat = [*_TEXT[:30], *ids(first), 5, 6]
            report = end(run(runner, [job(chat, 2)])[0]).report
        assert report is not None
        assert report.exact_tokens == (48 if reuse else 30), "all of the prompt; the chunks of all that was computed"
        assert report.bitwise is not reuse


@pytest.mark.usefixtures("prices_as_guessed")
def test_text_that_stands_elsewhere_is_moved(tiny: Callable[..., Any]) -> None:
    engine = engine_of(tiny("llama"), quality="high", force_approx=True, recompute_ratio=1.0)
    engine.warm(_TEXT[:64])
    prompt = [*_TEXT[150:158], *_TEXT[8:24], 5]
    with BatchRunner(engine, chunk_budget=8) as runner:
        free = run(runner, [job(prompt, 4)])[0]
        report = end(free).report
        assert report is not None
        assert (report.moved_tokens, report.bitwise) == (16, False)
        # Beside others, a repair that would hold them up for longer than two budgets is not done.
        long = [*_TEXT[160:168], *_TEXT[8:64], 6]
        both = run(runner, [job(_TEXT[200:204], 40), job(long, 4)])
        report = end(both[1]).report
        assert report is not None
        assert report.moved_tokens == 0
        assert "computes 56 tokens in one step would delay the other jobs (limit 16)" in str(report.reason)
        assert engine.cache_stats()["approximate_hits"] == 2, "those of the first job; the second used none"
    assert ids(both[1]) == alone(engine, long, 4)
    with BatchRunner(engine, deterministic=True) as runner:
        report = end(run(runner, [job([*_TEXT[170:178], *_TEXT[8:24], 5], 2)])[0]).report
        assert report is not None
        assert report.moved_tokens == 0


@pytest.mark.usefixtures("prices_as_guessed")
@pytest.mark.parametrize(("missing", "moved"), [(16, 56), (24, 0)])
def test_beside_others_what_a_repair_computes_counts_and_not_what_it_moves(
    tiny: Callable[..., Any], missing: int, moved: int
) -> None:
    settings = {"recompute_strategy": "none", "recompute_ratio": 0.0, "force_approx": True}
    engine = engine_of(tiny("llama"), quality="high", **settings)
    engine.warm(_TEXT[:64])
    prompt = [*_TEXT[160:168], *_TEXT[8:32], *_TEXT[210 : 210 + missing], *_TEXT[32:64], 6]
    with BatchRunner(engine, chunk_budget=8) as runner:
        both = run(runner, [job(_TEXT[200:204], 40), job(prompt, 4)])
    report = end(both[1]).report
    assert report is not None
    assert (report.moved_tokens, "delay" in str(report.reason)) == (moved, not moved)
    engine.close()


def test_moved_jobs_are_checked_as_other_requests_are(tiny: Callable[..., Any]) -> None:
    """On a random model no repair is not good enough: the check must see that here too, and put an end to it."""
    settings = {"recompute_strategy": "none", "recompute_ratio": 0.0, "quality": 0.05, "shadow_share": 1.0}
    engine = engine_of(tiny("llama"), force_approx=True, **settings)
    engine.warm(_TEXT[:160])
    assert engine.parts.shadow is not None
    shadow = engine.parts.shadow

    def ask_until_off() -> None:
        with BatchRunner(engine) as runner:
            for seed in range(40):
                run(runner, [job([*_TEXT[200 + seed : 208 + seed], *_TEXT[80:160], *_TEXT[:80], 5])])
                shadow.wait()
                if not engine.cache_stats()["non_prefix_reuse"]["allowed"]:
                    return

    with pytest.warns(RuntimeWarning, match="non-prefix reuse is now off"):
        ask_until_off()
    assert not engine.cache_stats()["non_prefix_reuse"]["allowed"]
    engine.close()


def test_what_can_never_fit_and_what_is_too_much_is_refused(tiny: Callable[..., Any]) -> None:
    engine = engine_of(tiny("llama"), kv_bytes="150kB")
    with BatchRunner(engine, max_waiting=2, max_running=1) as runner:
        with pytest.raises(CapacityError, match="lower max_new_tokens"):
            runner.submit(job(_TEXT[:200], 300))
        with pytest.raises(CapacityError, match="512 positions"):
            runner.submit(job([3] * 512, 1))
        with pytest.raises(CapacityError, match="at most 512"):
            runner.submit(job([3] * 513, 1))
        hold, go = threading.Event(), threading.Event()

        def block(tokens: list[int], logits: torch.Tensor) -> None:
            hold.set()
            go.wait(10)

        first = runner.submit(job([5], 2, constrain=block))
        hold.wait(10)
        others = [runner.submit(job([7], 2)) for _ in range(2)]
        assert (runner.load().running, runner.load().waiting) == (1, 2)
        with pytest.raises(CapacityError, match="2 jobs are waiting already"):
            runner.submit(job([7], 2))
        go.set()
        assert [end(list(ticket.events())).reason for ticket in (first, *others)] == ["length"] * 3


def bytes_per_token(model: Any) -> int:
    return probe_model(model).layout.bytes_per_token


def test_memory_stays_within_its_budget(tiny: Callable[..., Any]) -> None:
    row = bytes_per_token(tiny("llama"))
    engine = engine_of(tiny("llama"), kv_bytes=3 * 256 * row)
    seen: list[int] = []
    with BatchRunner(engine) as runner:
        watch = {"constrain": lambda tokens, logits: seen.append(runner.load().cached_bytes)}
        found = run(runner, [job(_TEXT[i : i + 150], 30, **watch) for i in range(8)])
    assert max(seen) == 3 * 256 * row, "three at a time"
    assert [ids(events) for events in found] == [alone(engine, _TEXT[i : i + 150], 30) for i in range(8)]


def test_long_answers_grow_and_are_preempted_in_turn(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.scheduler.sequence._INITIAL_NEW_TOKENS", 32)
    row = bytes_per_token(tiny("llama"))
    # Each begins with capacity for 256 tokens and comes to need 512, the second a step later; there is memory for 768.
    engine = engine_of(tiny("llama"), workspace_bytes=0, kv_bytes=768 * row)
    with BatchRunner(engine, max_wait_steps=10_000) as runner:
        seen: list[RunnerLoad] = []
        sent_back: list[int] = []
        close = runner._loop._close
        monkeypatch.setattr(runner._loop, "_close", lambda number: (sent_back.append(number), close(number))[1])
        watch = {"constrain": lambda tokens, logits: seen.append(runner.load())}
        found = run(runner, [job(_TEXT[i:10], 280, **watch) for i in range(2)])
        assert settled(engine, runner)
    assert max(load.cached_bytes // row for load in seen) == 768
    assert sent_back == [1], "the second, once"
    assert [ids(events) for events in found] == [alone(engine, _TEXT[i:10], 280) for i in range(2)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"new": 0},
        {"boundaries": (99,)},
        {"top_logprobs": -1},
        {"sampling": Sampling(top_p=2.0)},
        {"tokens": [99_999]},
    ],
)
def test_wrong_jobs_are_refused_at_once(wrong: dict[str, Any], tiny: Callable[..., Any]) -> None:
    with BatchRunner(engine_of(tiny("llama"), tenant="mine")) as runner:
        with pytest.raises(ConfigError):
            runner.submit(job(**{"tokens": [5, 6], **wrong}))
        assert end(run(runner, [job([5, 6], 2, tenant="mine")])[0]).reason == "length"


def test_tenants_share_the_batch_and_nothing_else(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny("llama"))
    with BatchRunner(engine) as runner:
        watched = Watched(engine, monkeypatch)
        found = run(runner, [job([*_TEXT[:32], 5, 6], 24, tenant=name) for name in ("", "a", "b", "a")])
        assert watched.rows_read() == 3 * 34, "the same text once for each tenant, all but the last token"
        assert ("decode", 4) in watched.did
        assert all(settled(view, runner) for view in (engine, engine.for_tenant("a"), engine.for_tenant("b")))
    reports = [end(events).report for events in found]
    assert [report.exact_tokens for report in reports if report] == [0, 0, 0, 33]
    assert {ids(events) for events in found} == {alone(engine, [*_TEXT[:32], 5, 6], 24)}


def test_slower_tiers_load_while_a_job_waits(tiny: Callable[..., Any], tmp_path: Path) -> None:
    with engine_of(tiny("llama"), disk_cache_dir=tmp_path) as first:
        first.warm(_TEXT[:64])
        first.flush()
    with engine_of(tiny("llama"), disk_cache_dir=tmp_path) as engine, BatchRunner(engine, max_running=1) as runner:
        store: Any = engine._store
        store._loader.rules = replace(store._loader.rules, compute_seconds=None)  # load, however fast computing is
        waiting: list[Any] = []

        def look(tokens: list[int], logits: torch.Tensor) -> None:
            if len(tokens) == 1:
                waiting.append(runner.submit(job([*_TEXT[:64], 5], 2)))
                fetch = runner._loop._jobs[max(runner._loop._jobs)].fetch
                assert fetch is not None
                while not fetch.is_over:
                    time.sleep(0.01)
                waiting.append(store.work()["disk"].hits)

        list(runner.submit(job(_TEXT[200:205], 4, constrain=look)).events())
        assert waiting[1] == 8, "in memory before its turn came"
        report = end(list(waiting[0].events())).report
    assert report is not None
    assert report.exact_tokens == 64


def test_an_error_ends_its_own_job_only(tiny: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(tiny("llama"))

    def breaks(tokens: list[int], logits: torch.Tensor) -> None:
        if len(tokens) == 3:
            raise RuntimeError("a grammar that went wrong")

    def forbids(tokens: list[int], logits: torch.Tensor) -> None:
        logits.fill_(-torch.inf)

    with BatchRunner(engine) as runner:
        jobs = [job(_TEXT[:30]), job(_TEXT[:30], constrain=breaks), job(_TEXT[5:50]), job([9], constrain=forbids)]
        found = run(runner, jobs)
        assert settled(engine, runner)
    assert [end(events).reason for events in found] == ["length", "error", "length", "error"]
    assert end(found[1]).error == "RuntimeError: a grammar that went wrong"
    assert "a job failed: RuntimeError at scheduler/test_runner.py:" in caplog.text
    assert "went wrong" not in caplog.text, "its words may be a client's"
    assert len(ids(found[1])) == 3
    assert end(found[1]).report is not None
    assert end(found[3]).report is None
    assert ids(found[0]) == alone(engine, _TEXT[:30])
    assert ids(found[2]) == alone(engine, _TEXT[5:50])


@pytest.mark.parametrize("step", ["advance", "finish"])
def test_a_prefill_step_that_fails_ends_its_own_job_only(
    step: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny("llama"))
    right = getattr(Prefiller, step)

    def sometimes(self: Prefiller, reading: Any, **arguments: Any) -> Any:
        if reading.tokens[0] == 96:
            raise RuntimeError("no memory")
        return right(self, reading, **arguments)

    monkeypatch.setattr(Prefiller, step, sometimes)
    with BatchRunner(engine, chunk_budget=8) as runner:
        found = run(runner, [job([96, *_TEXT[:30]]), job(_TEXT[:30])])
        assert settled(engine, runner)
    assert [end(events).reason for events in found] == ["error", "length"]


def submitted_together(runner: BatchRunner, jobs: Sequence[Job]) -> list[list[NewToken | Finished]]:
    """The events of jobs of which none is opened before all are submitted."""
    tickets: list[Ticket] = []

    def submit(tokens: list[int], logits: torch.Tensor) -> None:
        if not tickets:
            tickets.extend(runner.submit(one) for one in jobs)

    list(runner.submit(job([3, 4], 2, constrain=submit)).events())
    return [list(ticket.events()) for ticket in tickets]


def test_the_ends_of_prompts_that_come_together_are_read_in_one_step(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny("llama"))
    start = _TEXT[:64]
    prompts = [[*start, *_TEXT[70 + 9 * i : 73 + 10 * i]] for i in range(6)]
    with BatchRunner(engine) as runner:
        run(runner, [job(start, 1)])
        watched = Watched(engine, monkeypatch)
        found = submitted_together(runner, [job(tokens) for tokens in prompts])
        assert settled(engine, runner)
    tails = sum(len(prompt) for prompt in prompts) - 6 * 64
    assert ("read", tails) in watched.did
    assert watched.rows_read() == tails + 2
    assert [ids(events) for events in found] == [alone(engine, tokens) for tokens in prompts]
    reports = [end(events).report for events in found]
    assert [report and (report.exact_tokens, report.bitwise) for report in reports] == [(64, True)] * 6
    assert engine.session is not None
    assert engine.parts.layout is not None
    for prompt in prompts:  # what they stored has the bits of a cold run
        cold = SlabCache(engine.parts.layout, capacity=len(prompt))
        engine.parts.runner.append(prompt, cold, logits=False)
        with engine.session.prefiller.open([*prompt, 5]) as state:
            assert state.num_computed == len(prompt)
            assert all(map(same_bits, state.cache.extract(0, len(prompt)), cold.extract(0, len(prompt))))


def test_a_first_token_does_not_wait_for_prompts_that_are_read_after_it(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny("llama"))
    prompts = [_TEXT[i : i + 12] for i in (0, 20, 40)]
    order: list[str] = []
    with BatchRunner(engine, deterministic=True) as runner:
        step, put = RunningJob.prefill_step, Ticket.put
        monkeypatch.setattr(RunningJob, "prefill_step", lambda job: (order.append("read"), step(job))[1])
        monkeypatch.setattr(Ticket, "put", lambda ticket, event: (order.append("told"), put(ticket, event))[1])
        submitted_together(runner, [job(tokens, 1) for tokens in prompts])
    behind = order[order.index("read", 1) :]  # the job that submitted them is the first
    assert [what for what in behind if what == "read"] == ["read"] * 3
    assert behind[:4] == ["read", "told", "told", "read"], "its token and its end, before the next one is read"


def test_rows_nobody_uses_make_way_for_a_job_that_needs_their_memory(tiny: Callable[..., Any]) -> None:
    engine = engine_of(tiny("llama"))
    prompts = [_TEXT[i : i + 60] for i in range(6)]
    with BatchRunner(engine) as runner:
        seen: list[int] = []
        limit_spare = runner._loop.decoder.limit_spare

        def watched(nbytes: int) -> None:
            limit_spare(nbytes)
            batch = runner._loop.decoder.next_joint()
            assert batch is not None
            seen.append(batch.batch.spare_bytes)
            assert batch.batch.spare_bytes <= max(0, nbytes)

        runner._loop.decoder.limit_spare = watched  # type: ignore[method-assign]
        submitted_together(runner, [job(tokens, 3 + 3 * i) for i, tokens in enumerate(prompts)])
        assert max(seen) > 0, "rows are kept while there is memory"


def test_a_job_is_opened_after_rows_nobody_uses_have_made_way(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny("llama"))
    with BatchRunner(engine) as runner:
        late: list[Ticket] = []

        def submit_late(tokens: list[int], logits: torch.Tensor) -> None:
            if len(tokens) == 12:  # the others have ended, and their rows are spare
                assert spare() > 0
                late.append(runner.submit(job(_TEXT[:250], 4)))

        def spare() -> int:
            joint = runner._loop.decoder.next_joint()
            assert joint is not None
            return joint.batch.spare_bytes

        short = [job(_TEXT[i : i + 60], 3) for i in range(5)]
        last = job(_TEXT[5:65], 30, constrain=submit_late)
        nbytes = 7 * runner._loop._bytes_for(90)  # six rows and a spare one
        assert runner._loop._bytes_for(254) == 2 * runner._loop._bytes_for(90) == 2 * runner._loop._bytes_for(63)
        runner._loop.scheduler.limits = replace(runner._loop.scheduler.limits, kv_bytes=nbytes)
        over: list[int] = []
        opened = RunningJob.open

        def watched(running: RunningJob, **arguments: Any) -> None:
            over.append(spare() + runner._loop.scheduler.reserved_bytes - nbytes)
            opened(running, **arguments)

        monkeypatch.setattr(RunningJob, "open", watched)
        found = submitted_together(runner, [*short, last])
        assert [end(events).reason for events in [*found, list(late[0].events())]] == ["length"] * 7
    assert len(over) == 8
    assert max(over) <= 0


def test_prompts_that_cannot_be_read_together_are_read_one_by_one(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(tiny("llama"))
    prompts = [_TEXT[i : i + 12] for i in (0, 20, 40)]
    with BatchRunner(engine) as runner:
        monkeypatch.setattr(
            engine.parts.runner, "run_rows", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no memory"))
        )
        found = [submitted_together(runner, [job(tokens) for tokens in prompts]) for _ in range(2)]
        assert settled(engine, runner)
    said = [record.levelname for record in caplog.records if "no memory" in record.message]
    assert said == ["WARNING"], "the second one is not worth another"
    assert [[ids(events) for events in each] for each in found] == [[alone(engine, tokens) for tokens in prompts]] * 2


def test_a_joint_step_that_fails_is_done_one_by_one(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(tiny("llama"))
    with BatchRunner(engine) as runner:
        assert not runner.load().one_by_one
        monkeypatch.setattr(
            engine.parts.runner, "run_batch", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no memory"))
        )
        with pytest.warns(RuntimeWarning, match="one by one"):
            found = run(runner, [job(tokens) for tokens in _PROMPTS])
        assert runner.single_decode_reason == "a joint step failed: RuntimeError('no memory')"
        assert runner.load().one_by_one
    assert [record.levelname for record in caplog.records if "no memory" in record.message] == ["WARNING"]
    assert [ids(events) for events in found] == [alone(engine, tokens) for tokens in _PROMPTS]


def test_a_joint_step_that_fails_is_one_step(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny("llama"))
    with BatchRunner(engine) as runner:
        steps: list[int] = []
        run_batch = engine.parts.runner.run_batch

        def fails_once(tokens: Any, *arguments: Any, **keywords: Any) -> Any:
            steps.append(len(tokens))
            if len(steps) == 2:
                raise RuntimeError("no memory")
            return run_batch(tokens, *arguments, **keywords)

        monkeypatch.setattr(engine.parts.runner, "run_batch", fails_once)
        with pytest.warns(RuntimeWarning, match="one by one"):
            found = run(runner, [job(tokens, 12) for tokens in _PROMPTS])
        assert len(steps) > 8, "the steps behind it were joint ones again"
        assert runner.single_decode_reason is None
        assert not runner.load().one_by_one
        assert settled(engine, runner)
    assert [ids(events) for events in found] == [alone(engine, tokens, 12) for tokens in _PROMPTS]


@pytest.mark.parametrize("reuse_generated", [False, True])
def test_a_preempted_answer_is_prefilled(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, reuse_generated: bool
) -> None:
    engine = engine_of(tiny("llama"), reuse_generated=reuse_generated)
    prompts = [_TEXT[:20], _TEXT[40:70]]
    with BatchRunner(engine, max_running=1, max_wait_steps=8) as runner:
        watched = Watched(engine, monkeypatch)
        found = run(runner, [job(tokens, 40) for tokens in prompts])
        assert settled(engine, runner)
        assert runner.load().preempted >= 4
    decoded = sum(count for what, count in watched.did if what == "decode")
    assert decoded <= 2 * 40, "no token is fed a second time"
    assert [ids(events) for events in found] == [alone(engine, tokens, 40) for tokens in prompts]
    assert all(end(events).report.exact_tokens == 0 for events in found), "what was reused is told of the first time"


def test_tickets_end_even_if_the_runner_breaks(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(tiny("llama"))
    runner = BatchRunner(engine)
    monkeypatch.setattr(runner._loop.scheduler, "tick", lambda: 1 / 0)
    last = end(run(runner, [job(_TEXT[:30])])[0])
    assert last.reason == "error"
    assert "accepts no more jobs" in str(last.error)
    runner.close()
    assert settled(engine, runner)
    assert runner.load().failure == last.error
    assert "the runner failed: ZeroDivisionError at scheduler/test_runner.py:" in caplog.text
    with pytest.raises(ClosedError, match="ZeroDivisionError"):
        runner.submit(job([5]))


@pytest.mark.parametrize(
    ("kind", "name"), [(RunningJob, "must_grow"), (Sampler, "keep"), (PrefillState, "report")], ids=lambda it: str(it)
)
def test_wherever_a_job_fails_it_ends_alone(
    kind: Any, name: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, right = engine_of(tiny("llama")), getattr(kind, name)
    wrong = {  # the sampler in a joint step: the first token is each job's own
        RunningJob: lambda it: it.job.top_logprobs == 1,
        Sampler: lambda it: it._top_logprobs == 1 and len(it.generated) > 1,
    }

    def fails(self: Any, *arguments: Any) -> Any:
        if wrong.get(kind, lambda it: it.tokens[0] == 96)(self):
            raise RuntimeError("wrong")
        return right.fget(self) if isinstance(right, property) else right(self, *arguments)

    monkeypatch.setattr(kind, name, property(fails) if isinstance(right, property) else fails)
    with BatchRunner(engine) as runner:
        found = run(runner, [job(_TEXT[:30]), job([96, *_TEXT[:30]], top_logprobs=1), job(_TEXT[5:50])])
        assert runner.load().alive
        assert settled(engine, runner)
    assert [end(events).reason for events in found] == ["length", "error", "length"]
    assert ids(found[0]) == alone(engine, _TEXT[:30])


def test_a_batch_that_cannot_be_sampled_ends_its_jobs_only(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny("llama"))
    broken = torch.empty(2, 99, device="meta")  # logits that nobody can read
    with BatchRunner(engine) as runner:
        with monkeypatch.context() as patched:
            patched.setattr(JobDecoder, "together", lambda self, joint, jobs: (jobs, broken[: len(jobs)]))
            found = run(runner, [job(_TEXT[:30]), job(_TEXT[5:50])])
        assert [end(events).reason for events in found] == ["error", "error"]
        assert ids(run(runner, [job(_TEXT[:30])])[0]) == alone(engine, _TEXT[:30])
        assert settled(engine, runner)


@pytest.mark.parametrize("max_wait_steps", [1, 10_000], ids=["sent back", "ended"])
def test_a_job_that_cannot_give_back_what_it_holds_leaves_the_others_alone(
    max_wait_steps: int, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny("llama"))
    close = RunningJob.close

    def closes(self: RunningJob) -> None:
        was_open = self.is_open
        close(self)
        if was_open and self.job.token_ids[0] == 96:
            raise RuntimeError("no such lease")

    monkeypatch.setattr(RunningJob, "close", closes)
    with BatchRunner(engine, max_running=1, max_wait_steps=max_wait_steps) as runner:
        found = run(runner, [job([96, *_TEXT[:30]], 40), job(_TEXT[:30])])
        assert ids(found[1]) == alone(engine, _TEXT[:30])
        assert end(found[0]).reason == ("error" if max_wait_steps == 1 else "length")
        assert runner.load().alive
        assert settled(engine, runner)


def test_beginnings_that_cannot_be_compared_cost_the_joint_step_only(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny("llama"))
    monkeypatch.setattr(RunningJob, "shared_chain", lambda self: 1 / 0)
    with BatchRunner(engine) as runner:
        with pytest.warns(RuntimeWarning, match="one by one"):
            found = run(runner, [job(tokens) for tokens in _PROMPTS])
        assert runner.load().alive
    assert [ids(events) for events in found] == [alone(engine, tokens) for tokens in _PROMPTS]


def test_closing_ends_every_ticket(tiny: Callable[..., Any]) -> None:
    engine = engine_of(tiny("llama"))
    runner = BatchRunner(engine, max_running=2)
    tickets = [runner.submit(job(_TEXT[i : i + 100], 300)) for i in range(6)]
    runner.close()
    assert {end(list(ticket.events())).reason for ticket in tickets} == {"cancelled"}
    assert settled(engine, runner)
    runner.close()
    with pytest.raises(ClosedError, match="closed"):
        runner.submit(job([5]))


def test_stop_tokens_end_a_job_and_are_reported(tiny: Callable[..., Any]) -> None:
    engine = engine_of(tiny("llama"))
    free = alone(engine, _TEXT[:30])
    with BatchRunner(engine) as runner:
        events = run(runner, [job(_TEXT[:30], stop_token_ids=frozenset({free[3]}))])[0]
    assert ids(events) == free[: free.index(free[3]) + 1]
    assert end(events).reason == "stop"
    assert end(events).first_token_seconds is not None


def test_models_without_reuse_are_refused_and_long_ropes_bounded(tiny: Callable[..., Any]) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    engine = engine_of(tiny("llama", rope_parameters=rope, max_position_embeddings=64))
    with BatchRunner(engine) as runner:
        assert ids(run(runner, [job(_TEXT[:30])])[0]) == alone(engine, _TEXT[:30])
        with pytest.raises(CapacityError, match="dynamic RoPE"):
            runner.submit(job(_TEXT[:60]))


def test_many_threads_and_cancellations_leave_nothing_behind(tiny: Callable[..., Any]) -> None:
    engine = engine_of(tiny("llama"))
    expected: dict[int, tuple[int, ...]] = {i: alone(engine, _TEXT[i : i + 40], 12) for i in range(12)}
    wrong: list[Any] = []
    with BatchRunner(engine, max_running=5, max_wait_steps=6) as runner:

        def client(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(8):
                which = chance.randrange(12)
                ticket = runner.submit(job(_TEXT[which : which + 40], 12))
                stop_at = chance.choice([None, None, 0, 1, 5])
                if stop_at == 0:
                    ticket.cancel()
                said: list[int] = []
                for event in ticket.events():
                    if isinstance(event, NewToken):
                        said.append(event.token_id)
                        if len(said) == stop_at:
                            ticket.cancel()
                    elif event.reason == "error" or (stop_at is None and tuple(said) != expected[which]):
                        wrong.append((which, said, event))
                if tuple(said) != expected[which][: len(said)]:
                    wrong.append((which, said))

        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(12)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        assert wrong == []
        assert settled(engine, runner)


@pytest.mark.real
def test_a_trained_model_says_the_same_in_a_batch(smollm2: Any) -> None:
    model, tokenizer = smollm2
    start = "The castle stands on a hill above the river. It was built in 1204 and has four towers. " * 2
    prompts = [tokenizer(start + ask)["input_ids"] for ask in ("How many towers?", "When was it built?", "Where?")]
    found = {}
    for deterministic in (False, True):
        engine = KVBoost(model, tokenizer, chunk_size=32)
        with BatchRunner(engine, deterministic=deterministic) as runner:
            found[deterministic] = run(runner, [job(tokens, 5, top_logprobs=0) for tokens in prompts])
            again = run(runner, [job(prompts[1], 5, top_logprobs=0)])[0]
        single = [alone(engine, tokens, 5) for tokens in prompts]
        assert [ids(events) for events in found[deterministic]] == single
        if deterministic:
            assert again[:-1] == found[True][1][:-1], "alone and warm, among others and cold: the same bytes"


def _threads_of(tiny: Callable[..., Any]) -> set[str]:
    """Which threads run the model while many others submit jobs."""
    model, names = tiny("llama"), set[str]()
    with engine_of(model, quality="exact") as engine, BatchRunner(engine) as runner:
        hook = model.register_forward_pre_hook(lambda *_: names.add(threading.current_thread().name))
        decoder = model.get_decoder().register_forward_pre_hook(lambda *_: names.add(threading.current_thread().name))
        callers = [threading.Thread(target=run, args=(runner, [job(tokens, 4)])) for tokens in _PROMPTS]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        hook.remove()
        decoder.remove()
    return names


def test_one_thread_runs_the_model_for_all_jobs(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _threads_of(tiny) == {"kvboost-batch"}
    right = JobLoop.step

    def in_a_thread_of_its_own(self: BatchRunner, group: str) -> None:
        worker = threading.Thread(target=right, args=(self, group))
        worker.start()
        worker.join()

    monkeypatch.setattr(JobLoop, "step", in_a_thread_of_its_own)  # the test can fail
    assert _threads_of(tiny) != {"kvboost-batch"}
