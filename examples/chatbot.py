"""A chat in the terminal: each turn computes only what is new.

python examples/chatbot.py [--model MODEL]
"""

from __future__ import annotations

import argparse

from kvboost import KVBoost


def main() -> None:
    """Answer what is typed, until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    messages = [{"role": "system", "content": "You are friendly, and answer in one or two sentences."}]
    with KVBoost.from_pretrained(args.model, disk_cache_dir="kv-cache") as engine:  # the next start knows this chat
        while True:
            try:
                messages.append({"role": "user", "content": input("> ")})
            except EOFError:
                break
            answer = engine.chat(messages, max_new_tokens=64)
            messages.append({"role": "assistant", "content": answer.output_text})
            print(answer.output_text, f"[{answer.reuse}]", sep="\n")


if __name__ == "__main__":
    main()
