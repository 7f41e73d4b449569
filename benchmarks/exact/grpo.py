"""TRL's GRPO trainer samples groups with its default generation and with an attached model, in turn.

Run it where TRL is installed (``.ci/programs`` installs it). Steps of one training run alternate; each samples one
group and then writes to all weights, so nothing is reused but within a group. Measured is the time in
``model.generate``, hashing the new weights included; the trainer's own step is made cheap and not measured.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from contextlib import redirect_stdout
from typing import Any

import kvboost
from benchmarks.common.measure import TextSource, add_model_arguments, load_engine, positive, wall_ms
from benchmarks.common.report import BenchError, Progress, Report
from kvboost.bench.report import Spread, Table, describe_machine, ratios

QUICK = {"prompt": 150, "new": 4, "repeat": 1, "group": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.add_argument("--group", type=positive, default=8, help="samples of a prompt (default 8)")
    parser.add_argument("--prompt", type=positive, default=500, help="tokens of a prompt (default 500)")
    parser.add_argument("--new", type=positive, default=16, help="tokens of a sample (default 16)")
    parser.add_argument("--repeat", type=positive, default=5, help="groups measured of each (default 5)")


def run(args: argparse.Namespace) -> Report:
    """Rollouts per second. The claim fails where an attached group reads its prompt more than once."""
    try:
        import trl
    except ImportError as error:
        raise BenchError("this benchmark needs TRL; install it with pip install trl") from error
    report = Report("grpo")
    engine = load_engine(args, dtype=args.dtype)
    model, tokenizer = engine.model, engine.tokenizer
    engine.close()
    source = TextSource(tokenizer, args.text)
    steps = 2 * (1 + args.repeat)  # the first of each warms up
    prompts = [source.words(1000 * number, args.prompt) for number in range(steps)]
    times: dict[str, list[float]] = {"default": [], "attached": []}
    read: dict[str, list[int]] = {"default": [], "attached": []}
    progress = Progress(f"groups of {args.group}", steps)
    own, attached = model.generate, kvboost.attach(model)
    ours = model.generate
    counted: list[int] = []

    @functools.wraps(ours)
    def generate(*given: Any, **options: Any) -> Any:
        number = sum(map(len, times.values()))
        name = ("default", "attached", "attached", "default")[number % 4]
        call, output = {"default": own, "attached": ours}[name], []
        counted.clear()
        times[name].append(wall_ms(lambda: output.append(call(*given, **options))))
        read[name].append(sum(counted))
        progress.step()
        return output[0]

    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, given, inputs: counted.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    model.generate = generate
    try:
        _train(trl, model, tokenizer, prompts, args)
    finally:
        hook.remove()
        model.generate = ours
        attached.detach()
    measured = {name: taken[1:] for name, taken in times.items()}
    machine = describe_machine(dtype=args.dtype, model=str(args.model))
    title = f"GRPO: groups of {args.group}, prompts of about {args.prompt} tokens, {args.new} new tokens"
    table = Table(title, machine, ["generation", "rollouts per second", "default / attached", "tokens read per group"])
    report.tables.append(table)
    for name, taken in measured.items():
        table.add(
            name,
            Spread.of([1000 * args.group / ms for ms in taken]).text(2),
            Spread.of(ratios(measured["default"], taken)).text(2) if name == "attached" else "",
            Spread.of([float(count) for count in read[name][1:]]).text(0),
        )
    table.notes.append("Time in model.generate alone; every step writes to all weights before the next group.")
    report.raw = {"times": times, "read": read}
    report.failed = max(read["attached"]) * 2 > min(read["default"])
    return report


def _train(trl: Any, model: Any, tokenizer: Any, prompts: list[str], args: argparse.Namespace) -> None:
    """One group a step, with a loss that costs next to nothing and moves every weight."""
    from datasets import Dataset

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
            return sum(weight.sum() for weight in model.parameters()) * 1e-9

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        settings = trl.GRPOConfig(
            folder,
            bf16=False,
            use_cpu=model.device.type == "cpu",
            per_device_train_batch_size=args.group,
            num_generations=args.group,
            max_completion_length=args.new,
            generation_kwargs={"min_new_tokens": args.new},
            max_steps=len(prompts),
            learning_rate=1e-9,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        data = Dataset.from_dict({"prompt": prompts})
        Trainer(model, reward, args=settings, train_dataset=data, processing_class=tokenizer).train()
