from __future__ import annotations

import pytest

from kvboost.serve.generation.parts import (
    Content,
    Reasoning,
    ReasoningSplitter,
    TagFinder,
    hides_reasoning,
    opened_in,
    writes_reasoning,
)
from tests.helpers.tokenizer import byte_tokenizer


def _split(text: str, *, inside: bool, step: int) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside=inside)
    found = [part for at in range(0, len(text), step) for part in splitter.add(text[at : at + step])]
    found += splitter.end()
    return (
        "".join(part.text for part in found if isinstance(part, Reasoning)),
        "".join(part.text for part in found if isinstance(part, Content)),
    )


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>Hm.</think>Yes.", False, "Hm.", "Yes."),
        ("\n <think>Hm.</think>\n\nYes </think>.", False, "Hm.", "\n\nYes </think>."),
        ("Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("never closed </thin", True, "never closed </thin", ""),
        ("<think>never closed", False, "never closed", ""),
        ("Yes. <think>late</think>", False, "", "Yes. <think>late</think>"),
        ("<thin", False, "", "<thin"),
        (" \n", False, "", " \n"),
        ("<thinking>", False, "", "<thinking>"),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_what_an_answer_begins_with(
    text: str, inside: bool, reasoning: str, content: str, step: int
) -> None:
    assert _split(text, inside=inside, step=step) == (reasoning, content)


def test_a_prompt_may_open_it() -> None:
    assert opened_in("<assistant><think>\n")
    assert not opened_in("<assistant><think>\n\n</think>\n\n")
    assert not opened_in("<user>What does <think> mean?\n<assistant>")


def test_a_tokenizer_shows_whether_its_model_marks_it() -> None:
    tokenizer = byte_tokenizer()
    assert not writes_reasoning(tokenizer)
    tokenizer.add_tokens(["</think>"])
    assert writes_reasoning(tokenizer)
    assert not hides_reasoning(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    assert hides_reasoning(tokenizer)
    templated = byte_tokenizer()
    templated.chat_template += "{# <think> #}"
    assert writes_reasoning(templated)


@pytest.mark.parametrize("step", [1, 2, 100])
def test_a_tag_is_found_across_pieces(step: int) -> None:
    text, before = "a<<ta<tag>b<tag>", ""
    finder = TagFinder("<tag>")
    for start in range(0, len(text), step):
        piece, rest = finder.add(text[start : start + step])
        before += piece
        if rest is not None:
            assert (before, rest + text[start + step :]) == ("a<<ta", "b<tag>")
            return
    pytest.fail("the tag was not found")


def test_half_of_a_tag_is_given_back_at_the_end() -> None:
    finder = TagFinder("<tag>")
    assert finder.add("a<ta") == ("a", None)
    assert finder.end() == "<ta"
