"""A vLLM engine in a process of its own, run by vLLM's Python: one JSON line per order, one per answer.

python child.py MODEL '{"connector": {...} or null, "engine": {...}, "seed": "" or a fault}'
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any


def seed_fault(name: str) -> None:
    """Put a known fault into the connector."""
    from kvboost.integrations.vllm import identity, scheduler, worker

    if name == "salt ignored":
        plain = identity.RequestKeys.of
        identity.RequestKeys.of = lambda self, salt, lora: plain(self, None, lora)  # type: ignore[method-assign]
    elif name == "adapter ignored":
        plain = identity.RequestKeys.of
        identity.RequestKeys.of = lambda self, salt, lora: plain(self, salt, None)  # type: ignore[method-assign]
    elif name in ("a load fails", "a load fails, and its step is kept"):
        write, end = worker.WorkerSide._write, worker.WorkerSide.end

        def fail_once(self: Any, order: Any) -> None:
            worker.WorkerSide._write = write  # type: ignore[method-assign]
            raise RuntimeError("seeded")

        def keep_all(self: Any, orders: Any) -> None:
            orders.failures = self._failures
            end(self, orders)

        worker.WorkerSide._write = fail_once  # type: ignore[method-assign]
        if name != "a load fails":
            worker.WorkerSide.end = keep_all  # type: ignore[method-assign]
    elif name == "a fetch is never answered":
        worker.WorkerSide._fetch = lambda self, fetch: None  # type: ignore[method-assign]
        begin, steps = worker.WorkerSide.begin, itertools.count(1)

        def count(self: Any, orders: Any) -> None:
            if next(steps) == 3000:
                print("3000 steps", file=sys.stderr)
            begin(self, orders)

        worker.WorkerSide.begin = count  # type: ignore[method-assign]
    elif name == "one page off":
        plain_slots = worker.slots_of
        worker.slots_of = lambda pages, **at: plain_slots(pages.roll(1), **at)
    elif name == "shared pages":
        scheduler.set_apart = lambda request: None
    else:
        raise ValueError(name)


def main() -> None:
    """Serve orders until the input ends."""
    model, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no answer
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
        lora = LoRARequest(order["lora"], order["lora_id"], order["lora_path"]) if order.get("lora") else None
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
        seconds = time.perf_counter() - began
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

    print(json.dumps({"block_size": llm.llm_engine.vllm_config.cache_config.block_size}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "generate":
            answer = generate(order)
        elif order["do"] == "forget":
            answer = llm.reset_prefix_cache()
        else:
            break
        print(json.dumps(answer), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
