"""A text that is too long is refused after its first part, and one that fits never is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import PromptLengths
from tests.helpers.tokenizer import byte_tokenizer


class Counted:
    """A tokenizer of so many characters a token, that notes what it was given."""

    is_fast = True

    def __init__(self, characters: int) -> None:
        self._characters, self.given = characters, 0
        self.backend_tokenizer = self

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[range]:
        assert not add_special_tokens
        self.given += sum(map(len, texts))
        return [range(-(-len(text) // self._characters)) for text in texts]


def check(tokenizer: Any, limit: int | None, characters: int) -> None:
    PromptLengths(tokenizer, limit).check_text("x" * characters, param="prompt", in_use=nullcontext())


def test_of_a_text_that_is_too_long_only_the_beginning_is_tokenised() -> None:
    tokenizer = Counted(4)
    with pytest.raises(ApiError, match="the first 800 of which are 200 tokens; 100 fit") as refused:
        check(tokenizer, 100, 3000)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert tokenizer.given == 800


@pytest.mark.parametrize(("characters", "given"), [(400, 0), (800, 0), (801, 800)])
def test_a_text_that_may_fit_is_tokenised_once_by_its_caller(characters: int, given: int) -> None:
    tokenizer = Counted(8)
    check(tokenizer, 100, characters)
    assert tokenizer.given == given


def test_a_text_that_no_tokens_can_hold_is_not_tokenised_at_all() -> None:
    tokenizer = Counted(32)
    check(tokenizer, 100, 3200)
    given = tokenizer.given
    with pytest.raises(ApiError, match="3201 characters, more than 100 tokens can hold"):
        check(tokenizer, 100, 3201)
    assert tokenizer.given == given


def test_without_a_limit_everything_is_taken() -> None:
    check(Counted(1), None, 10**6)


def test_a_real_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    check(tokenizer, 100, 800)  # looked at by whoever tokenises all of it
    with pytest.raises(ApiError, match="the first 800 of which are 800 tokens"):
        check(tokenizer, 100, 801)
