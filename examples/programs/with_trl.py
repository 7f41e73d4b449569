"""TRL's GRPO trainer, attached: a group of eight samples reads its prompt once, and anew after each optimizer step.

python examples/programs/with_trl.py MODEL
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import kvboost

TEXT = "The mill was built in 1840, burned down in 1911 and was rebuilt of stone. " * 6
QUESTIONS = ["When was it built?", "When did it burn down?"]


def main() -> None:
    """Train for two steps, of one group each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the hub")
    name = parser.parse_args().model
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    fast = torch.accelerator.is_available()
    model.to(torch.accelerator.current_accelerator() if fast else "cpu")  # before: an engine is made for one place
    kvboost.attach(model)  # the new line
    given, read = [], []  # tokens of all prompts; tokens that the model reads while it samples

    def shorter(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        given.extend(len(tokens) for tokens in tokenizer(prompts)["input_ids"])
        return [-float(len(text)) for text in completions]

    def count(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            read.append(inputs["input_ids"].numel())

    model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"num_generations": 8, "per_device_train_batch_size": 8, "max_completion_length": 8}
        settings |= {"max_steps": 2, "save_strategy": "no", "report_to": []}
        args = GRPOConfig(folder, **settings, use_cpu=not fast, bf16=fast)
        prompts = Dataset.from_dict({"prompt": [f"{TEXT}\n{question}\n" for question in QUESTIONS]})
        GRPOTrainer(model, shorter, args=args, train_dataset=prompts, processing_class=tokenizer).train()
    print(f"{sum(given)} tokens of prompts; to sample, {sum(read)} were read, the samples' own among them")
    sys.exit(None if sum(read) < sum(given) / 2 else "nothing was reused")


if __name__ == "__main__":
    main()
