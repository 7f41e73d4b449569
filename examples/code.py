"""Several questions about one source file. Run it twice: the second time the file comes from the disk.

python examples/code.py [--model MODEL] [--file FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvboost import KVBoost

QUESTIONS = ["What does this file do?", "Which function is called first?", "What could go wrong here?"]


def main() -> None:
    """Ask about a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--file", type=Path, default=Path(__file__))
    args = parser.parse_args()
    code = f"```python\n{args.file.read_text()}\n```\n\n"
    with KVBoost.from_pretrained(args.model, disk_cache_dir="kv-cache") as engine:
        for question in QUESTIONS:
            answer = engine.generate(f"{code}{question}\n", max_new_tokens=32, temperature=0)
            print(f"{question} {answer.output_text.strip()}\n[{answer.reuse}]")


if __name__ == "__main__":
    main()
