from __future__ import annotations

import random

import pytest
import torch

from kvboost.capacity import row_capacity, workspace_capacity
from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.cache_layers import StateSpec
from kvboost.hf.rows import Row, RowBatch

_CPU = torch.device("cpu")
_LAYOUT = KVLayout(
    (
        TensorSpec(2, 4, torch.float32, _CPU),
        TensorSpec(2, 4, torch.float32, _CPU),
        TensorSpec(1, 8, torch.float32, _CPU),
        TensorSpec(1, 6, torch.float32, _CPU),
    )
)


def block(tokens: int, value: float) -> list[torch.Tensor]:
    return [torch.full((len(slots), spec.heads, tokens, spec.dim), value) for spec, slots in _LAYOUT.groups.items()]


def holds(row: Row, value: float) -> bool:
    return all(bool((part == value).all()) for part in row.span(0, row.get_seq_length()))


def test_rows_come_go_and_grow_and_every_sequence_keeps_its_states() -> None:
    spec = StateSpec(2, "recurrent", 0, (3, 2), torch.float32, _CPU)
    layout = KVLayout(_LAYOUT.slots, without_kv=(2,), states=(spec,))
    chance, batch = random.Random(1), RowBatch(layout)
    rows: dict[int, Row] = {}
    for number in range(1, 100):
        batch.limit_spare(chance.choice([0, 10**5]))
        if rows and chance.random() < 0.45:
            batch.remove(rows.pop(chance.choice(list(rows))))
        else:
            row = rows[number] = batch.add(tokens=chance.randrange(1, 700), filled=0)
            row.place_states([torch.full(spec.shape, float(number))])
        assert all(bool((row.states()[0] == number).all()) for number, row in rows.items())
        assert all(group.row_bytes == group.capacity * layout.bytes_per_token + 24 for group in batch.groups)


def test_a_row_takes_no_more_than_admission_reserves() -> None:
    for tokens in range(1, 40_000):
        assert tokens <= row_capacity(tokens) <= workspace_capacity(tokens)
    assert len({row_capacity(tokens) for tokens in range(1, 8193)}) == 14, "attention calls per layer, at most"


def test_rows_come_go_and_grow_and_every_sequence_keeps_its_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a padded call reads is a number, even though fresh memory is not."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))
    chance, batch = random.Random(1), RowBatch(_LAYOUT)
    rows: dict[int, Row] = {}
    for number in range(300):
        batch.limit_spare(chance.choice([0, 10**5, 10**9]))
        if rows and chance.random() < 0.45:
            batch.remove(rows.pop(chance.choice(list(rows))))
        else:
            length = chance.randrange(1, 700)
            row = rows[number] = batch.add(tokens=length + 10, filled=length)
            row.place(0, block(length, float(number)))
            row.set_length(length)
        assert all(holds(row, float(number)) for number, row in rows.items())
        assert sorted(row.order for row in rows.values()) == [row.order for group in batch.groups for row in group.rows]
        for group in batch.groups:
            assert [row.index for row in group.rows] == list(range(len(group.rows)))
            longest = max(row.get_seq_length() for row in group.rows) + 1
            group.clear_up_to(longest)
            assert not any(bool(store[: len(group.rows), :, :longest].isnan().any()) for store in group.stores)
    while rows:
        batch.remove(rows.pop(next(iter(rows))))
    assert batch.groups == []


def test_spare_rows_keep_to_what_is_left_for_them() -> None:
    batch = RowBatch(_LAYOUT)
    rows = [batch.add(tokens=100) for _ in range(3)]
    assert batch.spare_bytes == 0
    batch.limit_spare(2 * rows[0].nbytes)
    rows.append(batch.add(tokens=100))
    assert batch.spare_bytes == 2 * rows[0].nbytes
    batch.add(tokens=300)
    assert batch.spare_bytes == 2 * rows[0].nbytes, "nothing is left for another group"
    batch.limit_spare(rows[0].nbytes)
    assert batch.spare_bytes <= rows[0].nbytes
    for row in rows[:3]:
        batch.remove(row)
        assert batch.spare_bytes <= rows[0].nbytes


def test_a_row_is_one_sequence_of_at_most_its_capacity() -> None:
    row = RowBatch(_LAYOUT).add(tokens=10)
    with pytest.raises(ValueError, match="do not fit"):
        row.set_length(row.capacity + 1)
    with pytest.raises(NotImplementedError):
        row.batch_repeat_interleave(2)
    row.place(0, block(4, 3.0))
    row.wipe(1, 3)
    assert row.extract(0, 4)[0][0, 0, :, 0].tolist() == [3.0, 0.0, 0.0, 3.0]
