"""Which files of the package run for one warm request: ``python -m tools.request_path [--served]``.

A tiny model answers a prompt, and the same prompt again. Of the second time, the files are listed in the order in which
code of theirs first runs, in whatever thread, each with the function that is entered there. ``--served``: a chat over a
socket to a server in this process.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import uvicorn

import kvboost
from kvboost import KVBoost
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve.app import make_app
from kvboost.serve.run import http_config
from kvboost.serve.security.limits import Limits
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_PACKAGE = Path(kvboost.__file__).parent
_TEXT = "The lighthouse stands on a rock. " * 20


class Watch:
    """Sees which code runs, from when it is made, in this thread and in those that start later."""

    def __init__(self) -> None:
        self._entered: dict[CodeType, None] | None = None
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._entered is not None:
            self._entered.setdefault(frame.f_code)

    def functions(self, work: Callable[[], object]) -> list[tuple[str, str]]:
        """The package's files and functions that ``work`` runs, each when it is first entered."""
        self._entered = {}
        work()
        entered, self._entered = self._entered, None
        files = [(Path(code.co_filename), code.co_qualname) for code in entered]
        return [(str(file.relative_to(_PACKAGE)), name) for file, name in files if file.is_relative_to(_PACKAGE)]


def of_generate() -> list[tuple[str, str]]:
    """What runs for ``KVBoost.generate`` around a model that is loaded already."""
    watch = Watch()
    with KVBoost(_model(), byte_tokenizer()) as engine:
        engine.generate(_TEXT, max_new_tokens=4)
        return watch.functions(lambda: engine.generate(_TEXT, max_new_tokens=4))


def of_chat() -> list[tuple[str, str]]:
    """What runs for a chat request to a server."""
    watch = Watch()
    body = {"model": "tiny", "messages": [{"role": "user", "content": _TEXT}], "max_tokens": 4}
    with KVBoost(_model(), byte_tokenizer()) as engine, BatchRunner(engine) as runner:
        app = make_app(engine, runner, model_name="tiny")
        config = http_config(app, limits=Limits(), drain_seconds=1)
        config.port = 0
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                client.post("/v1/chat/completions", json=body).raise_for_status()
                time.sleep(0.5)  # the loop ends its last step
                return watch.functions(lambda: client.post("/v1/chat/completions", json=body).raise_for_status())
        finally:
            server.should_exit = True
            thread.join()
            app.state.service.close()


def _model() -> Any:
    return tiny_model("llama", vocab_size=260, max_position_embeddings=2048)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the files and their number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--served", action="store_true", help="a chat over HTTP instead of a call of generate")
    found = of_chat() if parser.parse_args(arguments).served else of_generate()
    files = dict(reversed(found))
    for file in dict(found):
        print(f"{file}: {files[file]}")
    print(f"{len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
