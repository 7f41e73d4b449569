from __future__ import annotations

from typing import Any

import pytest

from kvboost.serve.generation.parts import Call, JsonSpan, read_alone, read_mistral, read_object, read_tagged

_PARIS = Call("get_weather", {"city": "Paris"})
_CODER = (
    "\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
)


@pytest.mark.parametrize(
    ("read", "body", "calls"),
    [
        (read_tagged, '\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n', [_PARIS]),
        (read_tagged, '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', [_PARIS]),
        (read_tagged, '{"name": "f", "arguments": {"x": "<function=g></function>"}}', None),
        (read_tagged, _CODER, [Call("get_weather", {"city": "Paris", "days": 3})]),
        (read_tagged, "<function=f></function>", [Call("f", {})]),
        (read_object, '{"name": "get_weather", "parameters": {"city": "Paris"}}', [_PARIS]),
        (read_alone, '{"name": "get_weather", "arguments": {"city": "Paris"}}', [_PARIS]),
        (
            read_alone,
            '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Paris"}}}',
            [_PARIS],
        ),
        (read_mistral, ' [{"name": "get_weather", "arguments": {"city": "Paris"}}]', [_PARIS]),
        (read_mistral, 'get_weather[ARGS]{"city": "Paris"}', [_PARIS]),
        (read_mistral, 'get_weather[CALL_ID]9cAbCdEfG[ARGS]{"city": "Paris"}', [_PARIS]),
        (read_mistral, 'get_weather{"city": "Paris"}', [_PARIS]),
    ],
)
def test_recorded_calls(read: Any, body: str, calls: Any) -> None:
    assert read(body) == (calls or [Call("f", {"x": "<function=g></function>"})])


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_tagged, ""),
        (read_tagged, '{"name": "get_weather", "argum'),
        (read_tagged, '{"name": 3, "arguments": {}}'),
        (read_tagged, '{"name": "f", "arguments": [1]}'),
        (read_tagged, '{"name": "f", "arguments": {"x": NaN}}'),
        (read_tagged, "<function=f><parameter=x>1</function>"),
        (read_tagged, "<function=f>"),
        (read_object, '{"city": "Paris"}'),
        (read_object, "{" * 2000),
        (read_alone, '{"name": "get_weather"}'),
        (read_alone, "[1]"),
        (read_mistral, ' [{"name"'),
        (read_mistral, "get_weather[ARGS]"),
        (read_mistral, " [[1]]"),
    ],
)
def test_anything_else_is_no_call(read: Any, body: str) -> None:
    assert read(body) == []


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('{"a": "}"}rest', 10),
        ('{"a": "\\"}"}rest', 12),
        ('{"a": "\\\\"}rest', 11),
        ('name[ARGS]{"a": {"b": [1]}}rest', 27),
        ('[{"a": "]"}, [1]]rest', 17),
        (' {"a": 1', None),
        ("no bracket", None),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 100])
def test_a_span_ends_with_its_last_bracket_however_it_comes(text: str, end: int | None, step: int) -> None:
    span = JsonSpan()
    for start in range(0, len(text), step):
        found = span.end_in(text[start : start + step])
        if found is not None:
            assert start + found == end
            return
    assert end is None
