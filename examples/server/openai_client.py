"""Two questions about one text, through OpenAI's client. Needs ``pip install openai``.

python examples/server/openai_client.py [--url URL] [--model MODEL]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Ask, and say what was reused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="model")
    args = parser.parse_args()
    text = Path(__file__).read_text()
    with OpenAI(base_url=f"{args.url}/v1", api_key="none") as client:
        for question in ("What does this program do?", "What does it need?"):
            messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
            answer = client.chat.completions.create(model=args.model, messages=messages, max_tokens=32)
            reused, prompt = answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens
            print(f"{reused} of {prompt} prompt tokens reused: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
