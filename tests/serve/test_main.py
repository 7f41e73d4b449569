from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from kvboost import ConfigError
from kvboost.serve import ServeSettings, main
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
from kvboost.serve import ServeSettings, main
settings = ServeSettings(model=sys.argv[1], port=0, api_keys=["a-key-of-somebody"], engine={"chunk_size": 32})
main(settings, ready=lambda host, port: print(port, flush=True))
"""


def test_from_a_folder_to_an_answer_to_the_end(tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=260).save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "tiny")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="a-key-of-somebody") as client:
            answer = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x" * 100}], max_tokens=3
            )
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 3
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"host": "0.0.0.0"}, "API key"),
        ({"api_keys": ["short"]}, "8 or more"),
        ({"limits": {"colour": 3}}, "colour"),
        ({"limits": {"streams": 0}}, "streams"),
        ({"engine": {"draft": "prompt-lookup"}}, "draft"),
    ],
)
def test_what_cannot_work_is_said_before_the_model_is_loaded(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        main(ServeSettings(model="/there/is/no/such/model", **settings))  # type: ignore[arg-type]


def test_settings_do_not_show_keys() -> None:
    settings = ServeSettings(model="x/y", api_keys=["secret-key"], admin_key="other-secret")
    assert "secret" not in repr(settings)
    assert settings.served_name == "y"


def test_a_folder_is_served_under_its_name_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tiny")
    assert ServeSettings(model=".").served_name == "tiny"
    monkeypatch.chdir("inner")
    assert ServeSettings(model="..").served_name == "tiny"
