from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvboost.core.chunking import make_chunker
from kvboost.core.keys import PromptKeys, fingerprint_root
from kvboost.types import Fingerprint, ModelSnapshot

_TOKENS = list(range(40))


class _Model:
    """A model that is whatever ``state`` says."""

    state: object = "A"
    snapshots = 0

    def snapshot(self) -> ModelSnapshot:
        self.snapshots += 1
        names = [f.name for f in fields(Fingerprint) if f.name not in ("chunker", "codec", "tenant", "salt")]
        return ModelSnapshot(self.state, {name: f"{name} of {self.state}" for name in names})

    def is_current(self, snapshot: ModelSnapshot) -> bool:
        return self.state == snapshot.state


def _keys(model: _Model, *, tenant: str = "", codec: str = "raw", keeps_decoded: bool = False) -> PromptKeys:
    chunker = make_chunker("fixed", size=8)
    return PromptKeys(identity=model, chunker=chunker, tenant=tenant, codec=codec, keeps_decoded=keeps_decoded)


def test_a_key_belongs_to_the_model_it_was_made_from() -> None:
    model = _Model()
    keys = _keys(model)
    first = keys.snapshot()
    model.state = "B"
    assert not keys.is_current(first)
    second = keys.snapshot()
    assert second.root != first.root
    assert second.model.state == "B"
    model.state = "A"
    assert keys.is_current(first)
    assert keys.snapshot().root == first.root


def test_the_model_is_looked_at_once_for_a_key() -> None:
    model = _Model()
    _keys(model).snapshot()
    assert model.snapshots == 1


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"codec": "int8"}, {"keeps_decoded": True}])
def test_what_else_changes_kv_changes_the_root(other: dict[str, object]) -> None:
    model = _Model()
    assert _keys(model, **other).snapshot().root != _keys(model).snapshot().root  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{}, {"tenant": "b"}, {"codec": "int8"}, {"keeps_decoded": True}])
def test_the_root_is_that_of_the_fingerprint(given: dict[str, object]) -> None:
    keys = _keys(_Model(), **given)  # type: ignore[arg-type]
    assert fingerprint_root(keys.fingerprint()) == keys.snapshot().root


def test_a_namespace_is_the_root_of_no_request() -> None:
    """It lies in every header: from a root, keys of guessed texts could be computed."""
    model = _Model()
    keys = _keys(model)
    assert keys.namespace() not in (keys.snapshot().root, fingerprint_root(keys.fingerprint(adapter="")))


def test_a_tenant_differs_in_nothing_but_its_name() -> None:
    model = _Model()
    salted = PromptKeys(
        identity=model, chunker=make_chunker("fixed", size=8), tenant="", codec="raw", keeps_decoded=False, salt="s"
    )
    salted.snapshot()  # what one tenant has derived is not the other's
    assert replace(salted, tenant="b").snapshot().root not in (
        salted.snapshot().root,
        replace(_keys(model), tenant="b").snapshot().root,
    )
    assert replace(_keys(model), tenant="b").snapshot().root == _keys(model, tenant="b").snapshot().root


def test_chunks_say_whose_they_are_and_the_keys_tell_tenants_apart() -> None:
    ids = list(range(20))
    cut = {}
    for tenant in ("a", "b"):
        keys = _keys(_Model(), tenant=tenant)
        root = keys.snapshot().root
        chunks, tail = keys.chunks_and_tail(root, ids, [])
        assert tail is not None
        cut[tenant] = [*chunks, tail, *keys.chunks(root, ids, []), *keys.tails(root, ids, behind=chunks[0])]
        assert {chunk.tenant for chunk in cut[tenant]} == {tenant}
    one, other = ({key for c in found for key in (c.prefix_key, c.content_key)} for found in cut.values())
    assert not one & other


def test_the_salt_is_in_no_log() -> None:
    """What prints a fingerprint would tell the secret that protects its records."""
    names = [f.name for f in fields(Fingerprint) if f.name != "salt"]
    assert "secret" not in repr(Fingerprint(**dict.fromkeys(names, ""), salt="secret"))
