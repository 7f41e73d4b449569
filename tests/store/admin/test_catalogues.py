"""All records of a place, over every kind of place: listing, reading, damage, removal, copies."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.servers import free_port
from kvboost.errors import PlaceError
from kvboost.store.admin import open_catalogue
from kvboost.store.admin.base import Catalogue, Entry, KeyRing, Verdict, examine
from kvboost.store.record.format import RecordFormat, record_format
from kvboost.types import tenant_digest
from tests.contracts.blocks import assert_same
from tests.helpers.places import Place, blocks_of, of

MAC, AES = b"m" * 32, b"e" * 32
ACME, OTHER = RecordFormat(of("model", "acme")), RecordFormat(of("another model", "other"))


@contextmanager
def opened(place: Place, **options: Any) -> Iterator[Catalogue]:
    catalogue = open_catalogue(place.url, **options)
    try:
        yield catalogue
    finally:
        catalogue.close()


def fill(place: Place) -> None:
    place.fill(ACME, blocks_of("a", "b", "c"))
    place.fill(OTHER, blocks_of("x", "y"))


def verdicts(catalogue: Catalogue) -> dict[bytes, Verdict]:
    found = catalogue.verified(catalogue.entries(), keys=KeyRing())
    return {entry.key: finding.verdict for entry, finding in found}


def test_every_namespace_is_listed_without_a_model(place: Place) -> None:
    fill(place)
    with opened(place) as catalogue:
        entries = list(catalogue.entries())
        assert {(e.space, e.key) for e in entries} == {
            *((ACME.space, block.key) for block in blocks_of("a", "b", "c")),
            *((OTHER.space, block.key) for block in blocks_of("x", "y")),
        }
        assert {e.tenant for e in entries} == {tenant_digest("acme"), tenant_digest("other")}
        for entry, head in catalogue.heads(entries):
            assert head is not None
            header = examine(head, space=entry.space, key=entry.key).header
            assert header is not None
            assert header.tokens == 4
            assert entry.size >= header.record_bytes > 4096
            assert entry.used_at is not None
            assert abs(entry.used_at - time.time()) < 120


def test_records_come_whole_in_order_and_large_ones_too(place: Place) -> None:
    blocks = [*blocks_of("a", "b"), *blocks_of("l", "m", nbytes=2**21), *blocks_of("z")]
    place.fill(ACME, blocks)
    with opened(place) as catalogue:
        entries = [*catalogue.entries(), Entry(ACME.space, b"k" * 32, ACME.namespace.tenant, 10, None)]
        found = dict(catalogue.verified(entries, keys=KeyRing()))
        assert list(found) == entries
        for entry, finding in found.items():
            assert finding.verdict is (Verdict.MISSING if entry.key == b"k" * 32 else Verdict.WHOLE)
        heads = dict(catalogue.heads(entries))
        assert heads[entries[-1]] is None


@pytest.mark.parametrize("at", [0, 8, 30, 300, 4096, -1])
def test_a_flipped_bit_is_found(place: Place, at: int) -> None:
    fill(place)
    broken = blocks_of("a", "b")[1].key
    place.change(ACME, broken, at=at)
    with opened(place) as catalogue:
        found = {
            entry.key: finding.verdict for entry, finding in catalogue.verified(catalogue.entries(), keys=KeyRing())
        }
    assert found.pop(broken) is (Verdict.OTHER_VERSION if at == 8 else Verdict.DAMAGED)
    assert set(found.values()) == {Verdict.WHOLE}
    assert len(found) == 4


@pytest.mark.parametrize("junk", [b"", b"x", b"x" * 3 * 2**20])
def test_what_is_no_record_and_a_record_under_another_name_are_damage(place: Place, junk: bytes) -> None:
    if place.kind == "redis" and not junk:
        return  # an empty value is as good as none there
    fill(place)
    a, b, c = (block.key for block in blocks_of("a", "b", "c"))
    place.put(ACME, a, place._raw(ACME, c))
    place.put(ACME, b, junk)
    with opened(place) as catalogue:
        found = {
            entry.key: finding.verdict for entry, finding in catalogue.verified(catalogue.entries(), keys=KeyRing())
        }
        listed = {entry.key: head for entry, head in catalogue.heads(catalogue.entries())}
    assert (found[a], found[b], found[c]) == (Verdict.DAMAGED, Verdict.DAMAGED, Verdict.WHOLE)
    assert len(listed[b] or b"") <= 4096


def test_a_record_of_another_tenant_under_the_same_key_is_damage(place: Place) -> None:
    theirs = RecordFormat(of("model", "other"))
    place.fill(ACME, blocks_of("a"))
    place.fill(theirs, blocks_of("a"))
    place.put(ACME, blocks_of("a")[0].key, place._raw(theirs, blocks_of("a")[0].key))
    with opened(place) as catalogue:
        found = catalogue.verified(catalogue.entries(), keys=KeyRing())
        verdicts = {entry.space: finding.verdict for entry, finding in found}
    assert verdicts == {ACME.space: Verdict.DAMAGED, theirs.space: Verdict.WHOLE}


def test_removing_and_purging(place: Place) -> None:
    fill(place)
    gone = blocks_of("a", "b", "c")[2].key
    with opened(place) as catalogue:
        assert catalogue.remove([entry for entry in catalogue.entries() if entry.key == gone]) == 1
        assert len(list(catalogue.entries())) == 4
    with closing(place.tier(ACME)) as tier:
        assert tier.contains([gone]) == [False]
    with opened(place) as catalogue:
        assert catalogue.purge(tenant_digest("nobody")) == 0
        assert catalogue.purge(tenant_digest("acme")) == 2
        assert {entry.tenant for entry in catalogue.entries()} == {tenant_digest("other")}
        assert len(list(catalogue.entries())) == 2


@pytest.mark.parametrize("protection", ["mac", "encrypt"])
def test_records_with_a_secret_say_so(place: Place, protection: str) -> None:
    records = record_format(of("model"), codec="raw", max_bytes=2**20, protection=protection, key=MAC)
    place.fill(records, blocks_of("a", "b"))
    place.change(records, blocks_of("a")[0].key)
    right, wrong = KeyRing([MAC]), KeyRing([b"w" * 32])
    with opened(place) as catalogue:
        for ring, expected in ((KeyRing(), {"locked": 2}), (wrong, {"locked": 2}), (right, {"whole": 1, "damaged": 1})):
            found = catalogue.verified(catalogue.entries(), keys=ring)
            assert Counter(finding.verdict.value for _, finding in found) == expected


@pytest.mark.parametrize("protection", ["mac", "encrypt"])
def test_records_of_an_engine_with_a_key_file_are_read_with_it(tmp_path: Path, protection: str) -> None:
    place = Place("disk", str(tmp_path / "cache"))
    for tenant in ("acme", "other"):  # each has keys of its own, made from the one
        records = record_format(of("m", tenant), codec="raw", max_bytes=2**20, protection=protection, key=MAC)
        place.fill(records, blocks_of("a", "b"))
    with opened(place) as catalogue:
        for ring, expected in ((KeyRing([AES]), {"locked": 4}), (KeyRing([AES, MAC]), {"whole": 4})):
            found = catalogue.verified(catalogue.entries(), keys=ring)
            assert Counter(finding.verdict.value for _, finding in found) == expected


@pytest.mark.parametrize(
    "secrets", [{"encryption_key": AES}, {"mac_key": MAC}, {"mac_key": MAC, "encryption_key": AES}]
)
def test_records_that_no_engine_seals_are_locked_and_stop_nothing(place: Place, secrets: dict[str, bytes]) -> None:
    """Whoever can write to a shared place can put one there: a header without a MAC has no secret in its seal."""
    raw = RecordFormat(of("model"), **secrets)  # type: ignore[arg-type]
    place.fill(raw, blocks_of("a"))
    place.fill(ACME, blocks_of("b"))
    for ring in (KeyRing(), KeyRing([AES, MAC])):
        with opened(place) as catalogue:
            found = catalogue.verified(catalogue.entries(), keys=ring)
            assert Counter(finding.verdict.value for _, finding in found) == {"locked": 1, "whole": 1}


def test_a_directory_is_copied_with_tar(tmp_path: Path) -> None:
    """As docs/cli.md says: the index is made anew from the files."""
    source, target = Place("disk", str(tmp_path / "source")), Place("disk", str(tmp_path / "target"))
    fill(source)
    Path(target.url).mkdir(mode=0o700)
    archive = ["tar", "-C", source.url, "--exclude=./index-1*", "--exclude=./tmp", "-cf", str(tmp_path / "kv.tar"), "."]
    subprocess.run(archive, check=True)
    subprocess.run(["tar", "-C", target.url, "-xf", str(tmp_path / "kv.tar")], check=True)
    blocks = blocks_of("a", "b", "c")
    with closing(target.tier(ACME)) as tier:
        assert tier.contains([block.key for block in blocks]) == [True] * 3
        for block, found in zip(blocks, tier.load([block.key for block in blocks]), strict=True):
            assert_same(found, block)


# Places that are none


def test_a_directory_that_is_no_cache(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="there is no directory"):
        open_catalogue(str(tmp_path / "absent"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(PlaceError, match="no cache directory"):
        open_catalogue(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_looking_at_a_directory_changes_nothing(tmp_path: Path) -> None:
    place = Place("disk", str(tmp_path / "cache"))
    fill(place)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    with opened(place) as catalogue:
        list(catalogue.verified(catalogue.entries(), keys=KeyRing()))
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: at for path, at in after.items() if path.suffix not in (".sqlite-wal", ".sqlite-shm")} == before


def test_a_broken_index_hides_no_record(tmp_path: Path) -> None:
    place = Place("disk", str(tmp_path / "cache"))
    fill(place)
    for path in Path(place.url).glob("index-1.sqlite*"):
        path.write_bytes(b"broken" * 1000)
    with opened(place) as catalogue:
        assert len(list(catalogue.entries())) == 5
        assert catalogue.purge(tenant_digest("acme")) == 3
    with pytest.warns(RuntimeWarning, match="index was damaged"):
        tier = place.tier(OTHER)
    assert tier.stats().chunks == 2
    tier.close()


def test_a_tenant_is_purged_whose_records_are_all_broken(tmp_path: Path) -> None:
    place = Place("disk", str(tmp_path / "cache"))
    fill(place)
    for block in blocks_of("a", "b", "c"):
        place.put(ACME, block.key, b"broken")
    with opened(place) as catalogue:
        assert catalogue.purge(tenant_digest("acme")) == 3


def test_servers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlaceError, match="check that it runs") as caught:
        open_catalogue(f"redis://user:secret@127.0.0.1:{free_port()}/0")
    assert "secret" not in str(caught.value)


def test_a_place_of_another_kind_is_none() -> None:
    with pytest.raises(PlaceError, match="give a cache directory"):
        open_catalogue("s3://bucket/folder")
