"""Predicted against measured peak memory, in twelve configurations.

``--models`` holds the trained models smollm2-135m, gemma-3-270m and tinyllama-1.1b-chat; two random Llamas are made.
The prediction is made before anything is loaded, from the config and the checkpoint's header. Then a process of its own
loads the model, runs as many requests as the batch says side by side, each with a prompt of its own, and tells its
peak: VmHWM, set back after a tiny model has gone the same way, less what was resident then. So Python, torch,
Transformers and the matrix library's buffers are in neither figure; the estimate adds them as measured. A tokenizer of
bytes stands in for the model's own, which is counted with those. Lines that differ by more than 10 % are marked, and
none is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.process import memory_status
from benchmarks.common.report import BenchError, Report
from benchmarks.internals import BatchRunner, Finished, Job, ModelSource, measure_rates, model_on_disk, workload
from kvboost.bench.report import say
from kvboost.capacity import MAX_STEP, MemoryEstimate, estimate_memory
from kvboost.config import EngineConfig
from kvboost.engine import KVBoost

QUICK = {"only": [11]}

_NEW = 8
_STEP = 256
_BOUND = 0.10
_RANDOM = {
    "deep": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8,
             "num_key_value_heads": 8, "head_dim": 64},
    "wide": {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 16,
             "num_key_value_heads": 2, "head_dim": 64},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    context: int
    batch: int = 1
    dtype: str = "float32"
    bits: int = 16
    weight_share: int = 0
    """Of the weights, one part in so many as the budget."""
    kv_share: int = 0

    @property
    def how(self) -> str:
        parts = [f"KV stored in {self.bits} bits"] if self.bits != 16 else []
        parts += [f"1/{self.weight_share} of the weights, streamed"] if self.weight_share else []
        parts += [f"1/{self.kv_share} of the KV, paged"] if self.kv_share else []
        return ", ".join(parts) or "as it is"


CASES = (
    Case("smollm2-135m", 512),
    Case("smollm2-135m", 2048, bits=8),
    Case("smollm2-135m", 8000),
    Case("smollm2-135m", 1024, batch=4),
    Case("smollm2-135m", 1024, weight_share=4),
    Case("smollm2-135m", 4000, kv_share=8),
    Case("smollm2-135m", 512, batch=4, dtype="bfloat16"),
    Case("gemma-3-270m", 1024),
    Case("gemma-3-270m", 512, batch=4, bits=8),
    Case("tinyllama-1.1b-chat", 512, dtype="bfloat16"),
    Case("deep", 2000, batch=4),
    Case("wide", 2000, batch=4, bits=8),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="with the trained models")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of lines, from 1")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))


def run(args: argparse.Namespace) -> Report:
    """Predict, then measure in a process of its own."""
    report = Report("memory_plan")
    columns = ["", "model", "dtype", "context", "batch", "how", "predicted, MB", "measured, MB", "difference"]
    title = "Memory plan: predicted against measured peak"
    table = report.table(title, [*columns, "of the whole process", "base, MB"], dtype="as told")
    for number, case in enumerate(CASES, 1):
        if args.only and number not in args.only:
            continue
        if case.model not in _RANDOM and args.models is None:
            raise BenchError("this benchmark needs trained models; give --models FOLDER, or --only 11 12")
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            folder = prepare(case, args.models, Path(scratch))
            estimate, budget = predict(folder, case)
            found = measure(folder, budget, case)
        growth = estimate.device_bytes
        off = (growth - found["peak"]) / found["peak"]
        whole = (growth + found["base"]) / (found["peak"] + found["base"]) - 1
        mark = "" if abs(off) <= _BOUND else " (outside)"
        about = (case.model, case.dtype, case.context, case.batch, case.how)
        sizes = (f"{growth / 1e6:.0f}", f"{found['peak'] / 1e6:.0f}", f"{off:+.1%}{mark}", f"{whole:+.1%}")
        table.add(number, *about, *sizes, f"{found['base'] / 1e6:.0f}")
        report.raw[str(number)] = found
        say(f"{number}: {estimate}; {found}")
    return report


def prepare(case: Case, models: Path | None, scratch: Path) -> Path:
    """A folder with the model's config and weights, and a tokenizer that takes no memory."""
    from tests.helpers.tokenizer import byte_tokenizer

    folder = scratch / "model"
    if case.model in _RANDOM:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(**_RANDOM[case.model], vocab_size=8000, max_position_embeddings=16_384)
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        assert models is not None
        source = models.expanduser() / case.model
        folder.mkdir()
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            os.symlink(source / file, folder / file)
        if case.model.startswith("tinyllama") and case.dtype == "bfloat16":
            _convert(source / "model.safetensors", folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    """The checkpoint in bfloat16: a mapped float32 one of this size would be most of the peak."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    (folder / "model.safetensors").unlink()
    with safe_open(file, "pt") as source:
        tensors = {name: source.get_tensor(name).bfloat16() for name in source.keys()}  # noqa: SIM118
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))


def settings_of(case: Case, budget: int | None = None) -> dict[str, Any]:
    paged = {"kv_bytes": budget} if case.kv_share else {}
    return {"kv_cache_bits": case.bits, "quality": "exact", **paged}


def predict(folder: Path, case: Case) -> tuple[MemoryEstimate, int | None]:
    """The estimate, and the budget that the case's share comes to."""
    model = model_on_disk(ModelSource(str(folder), dtype=case.dtype, device="cpu"))
    weights, budget = model.weights, None
    if case.weight_share:
        budget = model.weights.resident // case.weight_share
        weights = model.streamed(budget)
    if case.kv_share:
        budget = case.context * model.shape.kv_per_token // case.kv_share
    work = workload(
        EngineConfig(**settings_of(case, budget)),
        context=case.context,
        batch=case.batch,
        layout=model.layout,
        step_tokens=MAX_STEP,
        stored_tokens=case.batch * case.context,
    )
    return estimate_memory(model.shape, weights, work), budget


def measure(folder: Path, budget: int | None, case: Case) -> dict[str, int]:
    code = (
        "import json; from pathlib import Path; from benchmarks.offload.memory_plan import Case, load_and_answer; "
        f"print('RESULT' + json.dumps(load_and_answer(Path({str(folder)!r}), {budget!r}, Case(**{asdict(case)!r}))))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise BenchError(f"the measured process failed: {ran.stderr[-2000:]}")
    found: dict[str, int] = json.loads(lines[0].removeprefix("RESULT"))
    return found


# What runs in the processes.


def load_and_answer(folder: Path, budget: int | None, case: Case) -> dict[str, int]:
    """Base and peak of this process."""
    import ctypes
    import gc

    from tests.helpers.models import tiny_model

    dtype = getattr(torch, case.dtype)
    with KVBoost(tiny_model("llama", dtype=dtype), chunk_size=8, kv_cache_bits=case.bits) as engine:
        answer(engine, vocab=90, tokens=40, batch=2)  # everything imported and started
        engine.generate([3, 4, 5], max_new_tokens=2)
    del engine
    # As before the estimate's own base: the matrix library's buffers.
    measure_rates(dtype=dtype, device=torch.device("cpu"), tokens=_STEP, files=[*folder.glob("*.safetensors")])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    base = memory_status("VmRSS")
    arguments = {"weight_budget": budget} if case.weight_share else {}
    with KVBoost.from_pretrained(
        str(folder), dtype=dtype, device="cpu", **arguments, **settings_of(case, budget)
    ) as engine:
        loaded = memory_status("VmHWM") - base
        if case.kv_share:
            ids = prompt(0, vocab=8000, tokens=case.context - _NEW)  # paged requests are not run side by side
            engine.generate(ids, max_new_tokens=_NEW, temperature=0)
        else:
            answer(engine, vocab=8000, tokens=case.context - _NEW, batch=case.batch)
        return {"base": base, "loaded": loaded, "peak": memory_status("VmHWM") - base}


def answer(engine: KVBoost, *, vocab: int, tokens: int, batch: int) -> None:
    with BatchRunner(engine, max_running=batch) as runner:
        jobs = [Job(token_ids=tuple(prompt(i, vocab=vocab, tokens=tokens)), max_new_tokens=_NEW) for i in range(batch)]
        tickets = [runner.submit(job) for job in jobs]
        ends = [[*ticket.events()][-1] for ticket in tickets]
    assert all(isinstance(end, Finished) and end.error is None for end in ends), ends


def prompt(number: int, *, vocab: int, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    ids: list[int] = torch.randint(3, vocab, (tokens,), generator=generator).tolist()
    return ids
