"""Prompts as a router reads them, against the engine and the server that will read them. Needs no Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvboost import KVBoost
from kvboost.core.chunking import make_chunker
from kvboost.core.keys import token_array
from kvboost.fleet.index import FleetIndex, keys_of_blocks
from kvboost.fleet.route import RouteCosts, RoutePrompt, Router
from kvboost.hf.breaks import break_table, light_tokenizer
from kvboost.integrations.ray.prompts import Facts, PromptReader
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve.app import make_app
from kvboost.serve.security.auth import Keys
from tests.integrations.ray.fleets import text
from tests.serve.asgi import ask
from tests.store.record.test_protection import KEY, key_file

_KEYS = ("first-key", "second-key")
_CHATS = "/v1/chat/completions"
_TEMPLATE = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": %s}'


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVBoost]:
    """Its keys are derived with a secret, which routers must know, too."""
    protected = {"record_protection": "mac", "record_key_file": key_file(tmp_path_factory.mktemp("key"), KEY)}
    with KVBoost.from_pretrained(str(model), cache_bytes=4 * 10**7, **protected) as made:
        yield made


def _scope(path: str, key: str | None = None) -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key is not None else []
    return {"type": "http", "method": "POST", "path": path, "headers": headers}


def _facts(engine: KVBoost) -> Facts:
    assert engine.session is not None
    made = Facts(
        fingerprint=engine.session.prefiller.keys.fingerprint(),
        chunking=str(engine.config.chunking),
        chunk_tokens=engine.config.chunk_tokens,
        approximate=False,
        shares=False,
    )
    carried = json.loads(json.dumps(asdict(made)))  # as plain values
    assert Facts.from_dict(carried) == made
    return made


@pytest.mark.parametrize("key", [None, *_KEYS])
@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_the_keys_are_those_that_the_server_stores_under(
    endpoint: str, key: str | None, model: Path, engine: KVBoost
) -> None:
    keys = Keys(_KEYS if key is not None else (), secret=b"x" * 32)
    path, body = {
        "completion": ("/v1/completions", {"prompt": text(1), "max_tokens": 1}),
        "chat": (
            "/v1/chat/completions",
            {
                "messages": [{"role": "system", "content": text(2)}, {"role": "user", "content": [_part(3), _part(4)]}],
                "max_tokens": 1,
            },
        ),
    }[endpoint]
    body["model"] = "tiny"
    engine.purge_all()
    with BatchRunner(engine) as runner:
        app = make_app(engine, runner, model_name="tiny", keys=keys)
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        assert ask(app, "POST", path, json=body, headers=headers).status_code == 200
        app.state.service.close()
    held = keys_of_blocks(engine.held_keys(10**6))

    tokenizer = light_tokenizer(str(model))
    facts = _facts(engine)
    chunker = make_chunker(facts.chunking, size=facts.chunk_tokens, breaks=break_table(tokenizer))
    assert chunker.spec == facts.fingerprint.chunker
    reader = PromptReader(tokenizer, min_gap=chunker.min_tokens, model_name="tiny", keys=keys)
    asked = reader.read(_scope(path, key), json.dumps(body).encode())
    assert asked is not None
    ids = token_array(asked.token_ids)
    ends = chunker.cut(ids, asked.boundaries)
    prompt = RoutePrompt.of(facts.root(asked.tenant), ids, ends)
    assert len(ends) > 8
    assert np.isin(prompt.prefix_keys, held).mean() > 0.95
    assert np.isin(prompt.content_keys, held).mean() > 0.95

    index = FleetIndex()
    index.replace("has it", held)
    index.replace("has nothing", keys_of_blocks([]))
    router = Router(index, RouteCosts(compute=1.0, move=0.2))
    choice = router.choose(prompt, queues={"has nothing": 0.0, "has it": 0.0})
    assert (choice.replica, choice.known) == ("has it", True)
    if key is not None:
        other = RoutePrompt.of(facts.root("another tenant"), ids, ends)
        assert not router.choose(other, queues={"has nothing": 0.0, "has it": 0.0}).known, "tenants share nothing"


def _part(seed: int) -> dict[str, str]:
    return {"type": "text", "text": text(seed, 60)}


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/v1/completions", b"no json", "first-key"),
        ("/v1/completions", b'{"prompt": 5}', "first-key"),
        ("/v1/completions", b'{"prompt": "x", "model": "an-adapter"}', "first-key"),
        ("/v1/completions", b'{"prompt": "x", "model": "tiny"}', "wrong-key"),
        ("/v1/completions", b"\xff\xfe", "first-key"),
        ("/v1/completions", b'{"prompt": [-1], "model": "tiny"}', "first-key"),
        ("/v1/chat/completions", b'{"messages": []}', "first-key"),
        (_CHATS, _TEMPLATE % b'{"chat_template": "{{ 1 // 0 }}"}', "first-key"),
        (_CHATS, _TEMPLATE % b'{"tokenize": false}', "first-key"),
        (_CHATS, _TEMPLATE % (b'{"x": ' + 200 * b"[" + 200 * b"]" + b"}"), "first-key"),
        ("/v1/nothing", b'{"prompt": "x"}', "first-key"),
        ("/v1/models", b"", "first-key"),
    ],
)
def test_what_cannot_be_read_is_left_to_the_replica(path: str, body: bytes, key: str, model: Path) -> None:
    reader = PromptReader(light_tokenizer(str(model)), min_gap=4, model_name="tiny", keys=Keys(_KEYS, secret=b"x" * 32))
    asked = reader.read(_scope(path, key), body)
    assert asked is None or (path != _CHATS and (not asked.token_ids or min(asked.token_ids) >= 0))


def test_what_a_front_imports_has_no_torch() -> None:
    modules = ["prompts", "config"]
    code = "import sys\n" + "".join(f"import kvboost.integrations.ray.{name}\n" for name in modules)
    code += "import kvboost.hf.breaks, kvboost.fleet.route, transformers\n"
    code += "from transformers import PreTrainedTokenizerFast\n"
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
