from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.errors import ConfigError
from kvboost.hf.sampling import Sampling
from kvboost.scheduler.jobs import Job, Sampler, sample_batch
from tests.helpers.devices import Devices, on_device

_LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.9, -1.0])


def sampler(*, top_logprobs: int | None = None, constrain: Any = None, device: str = "cpu", **settings: Any) -> Sampler:
    job = Job(
        token_ids=(1,),
        max_new_tokens=9,
        sampling=Sampling(**settings),
        top_logprobs=top_logprobs,
        constrain=constrain,
    )
    return Sampler(job, device=torch.device(device))


def test_greedy_takes_the_likeliest() -> None:
    assert sampler().sample(_LOGITS).token_id == 1


@given(seed=st.integers(0, 2**63 - 1))
@settings(deadline=None)  # other processes on the machine would fail it
def test_a_seed_gives_the_same_tokens_whoever_draws_between(seed: int) -> None:
    alone, among, other = (sampler(temperature=1.0, seed=seed) for _ in range(3))
    expected = [alone.sample(_LOGITS).token_id for _ in range(8)]
    found = []
    for _ in range(8):
        torch.rand(1)  # somebody uses the global generator
        other.sample(_LOGITS + 1)
        found.append(among.sample(_LOGITS).token_id)
    assert found == expected


def test_chance_follows_the_temperature() -> None:
    draws = sampler(temperature=0.5, seed=1)
    counts = Counter(draws.sample(_LOGITS).token_id for _ in range(4000))
    for token, share in enumerate((_LOGITS / 0.5).softmax(0).tolist()):
        assert abs(counts[token] / 4000 - share) < 0.03


def test_hardly_any_temperature_is_greedy() -> None:
    assert {sampler(temperature=1e-30, seed=i).sample(_LOGITS).token_id for i in range(20)} == {1}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    # 0.45, 0.41 and 0.06 come first: 0.8 needs two of them, and 0.1 still needs one.
    found = {p: set() for p in (0.8, 0.1)}
    for p, seen in found.items():
        draws = sampler(temperature=1.0, top_p=p, seed=3)
        seen.update(draws.sample(_LOGITS).token_id for _ in range(300))
    assert found == {0.8: {1, 3}, 0.1: {1}}


def test_penalties_count_what_was_generated() -> None:
    once = sampler(presence_penalty=0.2)
    assert [once.sample(_LOGITS).token_id for _ in range(4)] == [1, 3, 1, 1], "2.8 against 2.7, however often"
    often = sampler(frequency_penalty=0.2)
    assert [often.sample(_LOGITS).token_id for _ in range(4)] == [1, 3, 1, 3], "2.6 against 2.7 after two"


def test_the_prompt_and_the_ends_of_a_job_reach_its_processors() -> None:
    job = Job(token_ids=(1,), max_new_tokens=9, sampling=Sampling(repetition_penalty=2.0))
    assert Sampler(job, device=torch.device("cpu")).sample(_LOGITS).token_id == 3, "1 is in the prompt"
    longer = Job(
        token_ids=(0,), max_new_tokens=9, sampling=Sampling(min_new_tokens=1), stop_token_ids=frozenset({1, 3})
    )
    draws = Sampler(longer, device=torch.device("cpu"))
    assert [draws.sample(_LOGITS).token_id for _ in range(2)] == [2, 1]


def test_bias_and_constraint_decide_last() -> None:
    assert sampler(logit_bias={4: 100.0}).sample(_LOGITS).token_id == 4
    seen: list[list[int]] = []

    def only_small(tokens: list[int], logits: torch.Tensor) -> None:
        seen.append(tokens)
        logits[1:] = -torch.inf

    held = sampler(logit_bias={4: 100.0}, constrain=only_small)
    assert [held.sample(_LOGITS).token_id for _ in range(2)] == [0, 0]
    assert seen == [[], [0]]
    assert _LOGITS.tolist() == pytest.approx([0.0, 3.0, 1.0, 2.9, -1.0]), "the model's logits stay as they are"


def test_nothing_allowed_is_an_error() -> None:
    with pytest.raises(ConfigError, match="forbids them all"):
        sampler(constrain=lambda tokens, logits: logits.fill_(-torch.inf)).sample(_LOGITS)


def test_log_probabilities_are_the_models_own() -> None:
    found = sampler(temperature=0.3, seed=1, logit_bias={4: 100.0}, top_logprobs=2).sample(_LOGITS)
    expected = _LOGITS.log_softmax(0)
    assert found.token_id == 4
    assert found.logprob == pytest.approx(float(expected[4]))
    assert found.top == ((1, pytest.approx(float(expected[1]))), (3, pytest.approx(float(expected[3]))))
    assert sampler(top_logprobs=0).sample(_LOGITS).top == ()
    assert sampler().sample(_LOGITS).logprob is None


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"presence_penalty": float("inf")},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"min_new_tokens": -1},
        {"logit_bias": {5: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("inf")}},
    ],
)
def test_settings_nobody_can_sample_with(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**settings).check(vocab_size=5)


def test_a_batch_with_penalties_uploads_nothing_and_waits_once() -> None:
    """What was generated stays on the device: the host hands over nothing for a new token, however many there are."""
    kinds: list[dict[str, Any]] = [
        {"presence_penalty": 0.4},
        {"frequency_penalty": 0.3, "presence_penalty": 0.1},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    ]
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(1))
    here = [sampler(**kinds[i % 4]) for i in range(16)]
    with Devices() as seen:
        there = [sampler(**kinds[i % 4], device="cuda:0") for i in range(16)]
        on_it = on_device(logits, "cuda:0")
        for _ in range(6):
            expected = sample_batch(here, logits)
            seen.events.clear()
            assert sample_batch(there, on_it) == expected
            assert not seen.of("upload"), seen.of("upload")
            assert seen.counts["wait"] == 1
    assert len({tuple(one.generated) for one in there}) > 4
