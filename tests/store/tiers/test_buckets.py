"""Object stores of other vendors: Google's over a real socket (its protocol is close to S3's), Azure's by its URL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.buckets import open_objects
from kvboost.store.tiers.s3 import ObjectTier
from kvboost.testing.blocks import assert_same, block_of, namespace
from kvboost.testing.content import prompt
from kvboost.types import PutOutcome

RECORDS = RecordFormat(namespace())


def test_a_bucket_of_google_keeps_a_cache(
    s3: int, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = {"gcs_base_url": f"http://127.0.0.1:{s3}", "disable_oauth": True, "client_email": "", "private_key": ""}
    (tmp_path / "account").write_text(json.dumps({**account, "private_key_id": ""}))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account"))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    url = s3_url.replace("s3://", "gs://")
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
