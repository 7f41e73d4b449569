"""A small agent: it reads files until it can answer. Every step sends everything so far, and computes only what is new.

python examples/agent.py [--model MODEL] [--folder FOLDER]

A model of this size seldom follows the rules; the loop then reads the files in turn. What is shown is the reuse.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvboost import KVBoost

RULES = "You answer questions about files. To read one, write READ and its name, such as READ a.py, and nothing else."


def main() -> None:
    """Let it read, then answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    files = {path.name: path for path in sorted(args.folder.glob("*.py"))}
    unread = list(files)[:3]
    question = f"The files are {', '.join(unread)}. What are they for?"
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
    with KVBoost.from_pretrained(args.model) as engine:
        while True:
            step = engine.chat(messages, max_new_tokens=24, temperature=0)
            computed = step.prompt_tokens - step.cached_tokens
            print(f"{step.prompt_tokens} prompt tokens, {computed} computed: {step.output_text.strip()!r}")
            if not unread:
                break
            wanted = re.search(r"READ (\S+)", step.output_text)
            name = wanted[1] if wanted and wanted[1] in unread else unread[0]
            unread.remove(name)
            messages.append({"role": "assistant", "content": f"READ {name}"})
            messages.append({"role": "user", "content": f"{name}:\n{files[name].read_text()[:600]}"})


if __name__ == "__main__":
    main()
