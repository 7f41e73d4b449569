"""Reads a text with vLLM, empties vLLM's own cache, and reads it again from KVBoost's memory.

    python examples/vllm/run.py --model MODEL [--directory DIR]

Run it twice with the same directory: the second run finds the text on the disk at once.
"""

from __future__ import annotations

import argparse
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main() -> None:
    """Ask two questions about one text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--directory", default="kv-cache")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=2048,
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVBoostConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"disk_cache_dir": args.directory},
        ),
    )
    text = "The lighthouse of Brunn was built in 1871. " * 100
    for question in ("When was it built?", "Where does it stand?"):
        began = time.perf_counter()
        (answer,) = llm.generate([text + question], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        seconds = time.perf_counter() - began
        print(f"{answer.num_cached_tokens} of {len(answer.prompt_token_ids)} tokens reused, {seconds:.2f} s")
        llm.reset_prefix_cache()  # vLLM's own cache: the next question finds the text in KVBoost's tiers


if __name__ == "__main__":
    main()
