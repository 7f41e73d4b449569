"""Drafts of ``generate``: the same tokens as without, from cached prompts, streamed weights and piece by piece."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from kvboost import ConfigError, KVBoost
from kvboost.hf.numerics import choose
from kvboost.hf.weights import streamed_weights_of
from tests.helpers.models import NEWEST, tiny_model
from tests.helpers.tokenizer import byte_tokenizer

# Text that repeats itself, so that looking it up finds something.
_PROMPT = [(i * 37) % 11 + 3 for i in range(100)]
_SETTINGS: dict[str, Any] = {"chunk_size": 16, "chunking": "fixed"}
_GREEDY: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0, "eos_token_id": None}
_LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 10}


def _eager(model: Any, *, tokens: int = 4) -> Any:
    """A draft that proposes so many tokens, however sure it is."""
    model.generation_config.assistant_confidence_threshold = 0.0
    model.generation_config.num_assistant_tokens = tokens
    return model


def _half_right(family: str, **overrides: Any) -> Any:
    """A draft that is often right: the model itself with a little noise."""
    draft = tiny_model(family, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for parameter in draft.parameters():
            parameter.data += 0.05 * parameter.data.std(correction=0) * torch.randn_like(parameter)
    return _eager(draft)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "phi3"])
def test_greedy_tokens_are_those_of_no_draft_cold_and_warm(
    family: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "gemma3_text" and not NEWEST:
        pytest.skip("Transformers crops a draft's windows rightly since 5.22")
    monkeypatch.setattr(choose, "_GRID_ON_CPU", 16)  # for mixtral; the prompt is shorter than the real grid
    # For phi3 the draft itself is one with other layers: right sometimes only.
    draft = _eager(tiny_model(family, num_hidden_layers=1)) if family == "phi3" else _half_right(family)
    with KVBoost(tiny(family), **_SETTINGS) as plain:
        wanted = plain.generate(_PROMPT, **_GREEDY).token_ids
    accepted = []
    for given in ({"assistant_model": draft}, _LOOKUP):
        with KVBoost(tiny(family), **_SETTINGS) as engine:
            for again in (False, True):
                result = engine.generate(_PROMPT, **given, **_GREEDY)
                assert (result.reuse.exact_tokens > 90) is again
                assert result.reuse.bitwise
                assert result.token_ids == wanted
                told = result.speculation
                assert told is not None
                assert told.passes + told.accepted == len(wanted)
                assert told.accepted <= told.proposed
                accepted.append(told.accepted)
            assert engine.verify_correctness(_PROMPT)
    assert accepted[0] == accepted[1]  # a warm run's forwards have a cold run's shapes
    assert max(accepted) > 0


def test_kept_rows_are_those_of_no_draft_and_rejected_ones_are_not_kept(tiny: Callable[..., Any]) -> None:
    """With reuse_generated the answer's chunks are kept as well, and never as bitwise."""
    kept: list[dict[bytes, Any]] = []
    for draft in (None, _eager(tiny_model("llama", seed=1))):
        with KVBoost(tiny("llama"), reuse_generated=True, **_SETTINGS) as engine:
            result = engine.generate(_PROMPT, assistant_model=draft, **_GREEDY)
            whole = [*_PROMPT, *result.token_ids]
            assert engine.parts is not None
            chunks = engine.session.prefiller.chunk(whole[:-1], ()).chunks
            with engine._store.lease(chunks) as lease:
                blocks = {block.key: block for block in lease.blocks}
            assert len(blocks) == len(chunks) == (len(whole) - 1) // 16
            assert [block.bitwise for block in blocks.values()] == [chunk.end <= 96 for chunk in chunks]
            if draft is not None:
                told = result.speculation
                assert told is not None
                assert told.accepted < told.proposed  # something was rejected
            kept.append(blocks)
    assert kept[0].keys() == kept[1].keys()
    for key, block in kept[0].items():
        for one, other in zip(block.tensors, kept[1][key].tensors, strict=True):
            assert torch.equal(one, other) if block.bitwise else torch.allclose(one, other, atol=1e-4)


def test_what_a_draft_learnt_in_one_request_does_not_change_the_next(tiny: Callable[..., Any]) -> None:
    draft = _half_right("llama")
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"  # Transformers would keep it on the draft
    with KVBoost(tiny("llama"), **_SETTINGS) as engine:
        first, second = (engine.generate(_PROMPT, assistant_model=draft, **_GREEDY).speculation for _ in range(2))
    assert first == second
    assert draft.generation_config.num_assistant_tokens == 4


def test_one_pass_over_streamed_weights_verifies_several_tokens(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    tiny_model("llama", **shape).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with KVBoost.from_pretrained(str(tmp_path), **_SETTINGS) as resident:
        wanted = resident.generate(_PROMPT, **_GREEDY).token_ids
    for given in (_LOOKUP, {"assistant_model": tiny_model("llama", **shape)}):
        with KVBoost.from_pretrained(str(tmp_path), weight_budget="500kB", **_SETTINGS) as engine:
            streamer = streamed_weights_of(engine.model)
            assert streamer is not None
            engine.warm(_PROMPT)
            passes: list[int] = []
            engine.model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
            result = engine.generate(_PROMPT, **given, **_GREEDY)
            assert result.token_ids == wanted
            assert result.speculation is not None
            assert len(passes) == result.speculation.passes < len(wanted)


def test_streams_token_by_token(tiny: Callable[..., Any]) -> None:
    with KVBoost(tiny("llama", vocab_size=260), byte_tokenizer(), **_SETTINGS) as engine:
        whole = engine.generate("abc" * 30, **_LOOKUP, **_GREEDY)
        pieces = list(engine.stream("abc" * 30, **_LOOKUP, **_GREEDY))
    assert whole.speculation is not None
    assert whole.speculation.accepted > 0
    assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
    assert "".join(piece.text for piece in pieces) == whole.output_text
    assert pieces[-1].result is not None
    assert pieces[-1].result.speculation == whole.speculation


class _StopBehind(StoppingCriteria):
    """Looks at the last token only, as Transformers' own criteria do."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.asked.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] == self.length)


def test_an_answer_ends_where_it_would_without_a_draft(tiny: Callable[..., Any]) -> None:
    """Within the tokens of one pass: at a criterion, a stop string, the end token, the last token asked for."""
    model, tokenizer = tiny("llama", vocab_size=260), byte_tokenizer()
    text = "abc" * 30
    draft = _eager(tiny_model("llama", vocab_size=260), tokens=9)
    with KVBoost(model, tokenizer, **_SETTINGS) as plain, KVBoost(model, tokenizer, **_SETTINGS) as engine:
        free = plain.generate(text, **_GREEDY)
        late = free.token_ids[4]  # in the middle of the first pass: the draft is the model itself
        stops = _StopBehind(len(text) + 5)
        cases: list[dict[str, Any]] = [
            {"stopping_criteria": [stops]},
            {"stop_strings": [tokenizer.decode([late])]},
            {"eos_token_id": late},
            *({"max_new_tokens": n} for n in (1, 2, 7)),
        ]
        for case in cases:
            arguments = {**_GREEDY, **case, "return_dict_in_generate": True, "output_scores": True}
            one = plain.generate(text, **arguments)
            other = engine.generate(text, assistant_model=draft, **arguments)
            assert one.token_ids == other.token_ids, case
            assert one.finish_reason == other.finish_reason
            assert other.raw.sequences.shape == one.raw.sequences.shape
            assert len(other.raw.scores) == len(one.raw.scores) == len(one.token_ids)
            assert other.raw.past_key_values.get_seq_length() == other.raw.sequences.shape[1] - 1
        half = len(stops.asked) // 2
        assert stops.asked[:half] == stops.asked[half:] == [len(text) + n for n in range(1, 6)]


def test_a_prompt_near_the_last_position_is_answered_to_the_end(tiny: Callable[..., Any]) -> None:
    """What is proposed behind the last position would have no row in a table of learned positions."""
    prompt = (_PROMPT * 6)[:505]
    with KVBoost(tiny("gpt2"), **_SETTINGS) as engine:
        assert len(engine.generate(prompt, **_LOOKUP, **_GREEDY).token_ids) == 7


def test_requests_that_go_without_their_draft(tiny: Callable[..., Any]) -> None:
    with KVBoost(tiny("llama"), **_SETTINGS) as engine:
        for arguments in ({"num_beams": 2}, {"output_hidden_states": True, "return_dict_in_generate": True}):
            assert engine.generate(_PROMPT, **arguments, **_LOOKUP, **_GREEDY).speculation is None
        with pytest.raises(ConfigError, match="one prompt at a time"):
            engine.generate_batch([_PROMPT, _PROMPT[:50]], prompt_lookup_num_tokens=3)


def test_a_draft_for_one_request(tiny: Callable[..., Any]) -> None:
    with KVBoost(tiny("llama"), **_SETTINGS) as engine:
        wanted = engine.generate(_PROMPT, **_GREEDY).token_ids
        result = engine.generate(_PROMPT, assistant_model=_half_right("llama"), **_GREEDY)
        assert (result.token_ids, result.reuse.exact_tokens) == (wanted, len(_PROMPT) - 1)
        assert result.speculation is not None


def test_a_draft_that_the_models_own_generation_config_asks_for(tiny: Callable[..., Any]) -> None:
    with KVBoost(tiny("llama"), **_SETTINGS) as plain:
        wanted = plain.generate(_PROMPT, **_GREEDY).token_ids
    model = tiny_model("llama")
    model.generation_config.prompt_lookup_num_tokens = 3
    with KVBoost(model, **_SETTINGS) as engine:
        for exact in (0, 96):
            result = engine.generate(_PROMPT, **_GREEDY)
            assert (result.token_ids, result.reuse.exact_tokens) == (wanted, exact)
            assert result.speculation is not None
        assert engine.generate(_PROMPT, prompt_lookup_num_tokens=None, **_GREEDY).speculation is None
        with pytest.raises(ConfigError, match="prompt_lookup_num_tokens=None"):
            engine.generate_batch([_PROMPT, _PROMPT[:50]], **_GREEDY)
        batch = engine.generate_batch([_PROMPT, _PROMPT[:50]], prompt_lookup_num_tokens=None, **_GREEDY)
        assert batch[0].token_ids == wanted


_RUNS, _WORDS = 500, 4


@pytest.mark.parametrize("way", ["model", "prompt-lookup", "model, seeded bug"])
def test_samples_have_the_models_distribution(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two tokens of many samples against their probabilities by the model alone: chi-squared, fixed seed."""
    model = tiny_model("llama", vocab_size=_WORDS, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    prompt = [1, 2, 3, 0] * 3
    draft = tiny_model("llama", seed=8, vocab_size=_WORDS, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    given = _LOOKUP if way == "prompt-lookup" else {"assistant_model": _eager(draft, tokens=2)}
    if "bug" in way:  # the draft's tokens as they come
        monkeypatch.setattr(torch, "rand_like", lambda x: torch.zeros_like(x))
    expected = _pair_probabilities(model, prompt)
    assert min(expected.values()) * _RUNS > 1.0
    seen: Counter[tuple[int, ...]] = Counter()
    proposed = accepted = 0
    with torch.random.fork_rng(), KVBoost(model, chunk_size=4, chunking="fixed") as engine:
        torch.manual_seed(11)
        for _ in range(_RUNS):
            result = engine.generate(prompt, max_new_tokens=3, temperature=1.0, top_k=0, **given)
            seen[result.token_ids[:2]] += 1
            assert result.speculation is not None
            proposed, accepted = proposed + result.speculation.proposed, accepted + result.speculation.accepted
    assert 0 < accepted <= proposed
    assert (accepted == proposed) == ("bug" in way)
    chi_squared = sum((seen[pair] - _RUNS * p) ** 2 / (_RUNS * p) for pair, p in expected.items())
    chance = float(torch.special.gammaincc(torch.tensor((_WORDS**2 - 1) / 2), torch.tensor(chi_squared / 2)))
    assert chance < 1e-6 if "bug" in way else chance > 0.01, chance


@torch.no_grad()
def _pair_probabilities(model: Any, prompt: list[int]) -> dict[tuple[int, int], float]:
    rows = torch.tensor([[*prompt, word] for word in range(_WORDS)])
    logits = model(rows).logits.double().softmax(-1)
    return {(a, b): float(logits[a, -2, a] * logits[a, -1, b]) for a, b in itertools.product(range(_WORDS), repeat=2)}


@pytest.mark.real
def test_a_trained_model_says_the_same_with_a_draft(smollm2: Any, smollm2_path: str) -> None:
    model, tokenizer = smollm2
    text = "Water boils at 100 degrees at sea level. " * 3 + "Once more: Water"
    draft = type(model).from_pretrained(smollm2_path, dtype=torch.float32, num_hidden_layers=10).eval()
    arguments: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0}
    with KVBoost(model, tokenizer, chunk_size=16) as engine:
        wanted = engine.generate(text, **arguments)
        looked_up = engine.generate(text, prompt_lookup_num_tokens=10, **arguments)
        drafted = engine.generate(text, assistant_model=draft, **arguments)
    assert looked_up.token_ids == drafted.token_ids == wanted.token_ids
    assert looked_up.reuse.exact_tokens > 0
    assert looked_up.speculation is not None
    assert looked_up.speculation.accepted > looked_up.speculation.passes
