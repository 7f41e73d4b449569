"""Starts a server over a tiny random model and runs the matrix of clients against it, with their own Python.

``python -m tests.clients.run CLIENTS_PYTHON [pytest arguments]``. The exit code is that of the matrix.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.models import tiny_model
from tests.helpers.serving import kvboost_serve
from tests.helpers.tokenizer import byte_tokenizer

_KEY = "key-of-the-matrix"
_TEMPLATE = (
    "{# <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def main(python: str, *arguments: str) -> int:
    """Run the matrix."""
    with tempfile.TemporaryDirectory() as made:
        folder, keys, log = Path(made) / "model", Path(made) / "keys", Path(made) / "log"
        tiny_model("llama", vocab_size=260, max_position_embeddings=8192).save_pretrained(folder)
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = _TEMPLATE
        tokenizer.save_pretrained(folder)
        keys.write_text(_KEY)
        keys.chmod(0o600)
        with kvboost_serve(folder, ["--api-key-file", str(keys), "--chunk-size", "32"], log=log) as server:
            clients = {**os.environ, "KVBOOST_URL": server.url, "KVBOOST_KEY": _KEY}
            clients.pop("PYTHONPATH", None)  # of our environment
            clients["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network first
            command = [python, "-m", "pytest", "-c", "pytest.ini", "matrix.py", *arguments]
            code = subprocess.run(command, cwd=Path(__file__).parent, env=clients, check=False).returncode
        if code:
            print(log.read_text(), file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
