"""Object stores of other vendors: Google's against a small server of ours, Azure's by its URL."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.buckets import open_objects
from kvboost.store.tiers.s3 import ObjectTier
from kvboost.types import PutOutcome
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt

RECORDS = RecordFormat(namespace())


class _Google(BaseHTTPRequestHandler):
    """A bucket as Google serves it to clients of its XML interface: objects, and lists of them."""

    objects: ClassVar[dict[str, bytes]] = {}

    def do_PUT(self) -> None:
        if self.headers.get("x-goog-if-generation-match") == "0" and self._name in self.objects:
            self._answer(412)
            return
        self.objects[self._name] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if "list-type" in parts.query:
            self._answer(200, self._listed({name: value[0] for name, value in parse_qs(parts.query).items()}))
        else:
            self._answer(200 if self._name in self.objects else 404, self.objects.get(self._name, b""))

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self._answer(204 if self.objects.pop(self._name, None) is not None else 404)

    @property
    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

    def _listed(self, query: dict[str, str]) -> bytes:
        prefix = query.get("prefix", "")
        names = sorted(name for name in self.objects if name.startswith(prefix))
        below = sorted({name[len(prefix) :].partition("/")[0] for name in names if "/" in name[len(prefix) :]})
        if "delimiter" in query:
            names = [name for name in names if "/" not in name[len(prefix) :]]
        found = "".join(
            f"<Contents><Key>{name}</Key><Size>{len(self.objects[name])}</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for name in names
        )
        if "delimiter" in query:
            found += "".join(f"<CommonPrefixes><Prefix>{prefix}{name}/</Prefix></CommonPrefixes>" for name in below)
        return f"<ListBucketResult>{found}</ListBucketResult>".encode()

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("ETag", "e")
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def google() -> Iterator[int]:
    _Google.objects.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Google) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_bucket_of_google_keeps_a_cache(google: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = {"gcs_base_url": f"http://127.0.0.1:{google}", "disable_oauth": True}
    nobody = {"client_email": "", "private_key": "", "private_key_id": ""}
    (tmp_path / "account").write_text(json.dumps({**account, **nobody}))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account"))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    url = "gs://bucket/folder"
    assert EngineConfig(object_url=url).object_url == url
    tier = ObjectTier(url, capacity_bytes=10**6, records=RECORDS, timeout_s=30.0)
    chunks = prompt("a", "b")
    assert [tier.store(block_of(chunk)) for chunk in chunks] == [PutOutcome.STORED] * 2
    assert tier.leading_run([chunk.prefix_key for chunk in chunks]) == 2
    for found, chunk in zip(tier.load([chunk.prefix_key for chunk in chunks]), chunks, strict=True):
        assert_same(found, block_of(chunk))
    catalogue = open_catalogue(url)
    assert catalogue.limit() == 10**6
    assert catalogue.purge_all() == 2
    catalogue.close()
    assert tier.stats().chunks == 0
    tier.close()


def test_a_container_of_azure_is_opened_with_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "az://container/folder"
    assert EngineConfig(object_url=url).object_url == url
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match=r"AZURE_\* variables"):
        open_objects(url, timeout_s=1.0)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    objects, _ = open_objects(url, timeout_s=1.0)
    assert type(objects).__name__ == "AzureStore"
