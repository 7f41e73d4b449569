"""Streamed weights: models four times their budget, next to the resident run and to other offloaders.

``families``: tiny models of 18 families, streamed and resident: the same logits to the bit. ``large`` makes a
Llama-shaped checkpoint of random weights (2.7 GB) and runs it in processes of its own: resident; streamed with a
quarter of the weights, anonymous memory capped with RLIMIT_DATA and reads past the page cache; accelerate's disk
offload and AirLLM (if installed), with the same cap if they can. Rivals read through the page cache: once as it comes,
once with their files dropped from it before each token, as if the RAM were as small as the budget says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measure import positive
from benchmarks.common.process import drop_from_page_cache, memory_status
from benchmarks.common.report import BenchError, Report
from benchmarks.internals import root_key
from kvboost.bench.report import say
from kvboost.direct_io import up_to_page
from kvboost.engine import KVBoost
from kvboost.hf.weights import streamed_weights_of
from kvboost.offload.weights.link import FileSource, HostLink
from kvboost.offload.weights.streamer import WeightStreamer

QUICK = {"part": "families"}
_HEADROOM = 200 * 10**6  # beside the weights: activations, KV, stacks of threads, digests at loading
_PROMPT = 24
SIZES = {
    "full": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 26, "vocab_size": 8000},
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "vocab_size": 8000},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--part", choices=["families", "large", "trained"], default="large", help="default: large")
    parser.add_argument("--trained", type=Path, metavar="FOLDER", help="the model of the part trained")
    parser.add_argument("--small", action="store_true", help="a checkpoint of 0.8 GB instead of 2.7")
    parser.add_argument("--tokens", type=positive, default=8, help="to decode in each run (default 8)")
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where to make the checkpoint"
    )


def run(args: argparse.Namespace) -> Report:
    """One of the parts."""
    if args.part == "families":
        return families()
    if args.part != "large" and args.trained is None:
        raise BenchError(f"the part {args.part} needs a trained model; give its folder with --trained FOLDER")
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch) / "model"
        if args.part == "trained":
            shutil.copytree(args.trained.expanduser(), folder)
            return compare(args, folder, title=args.trained.name)
        make_checkpoint(folder, SIZES["small" if args.small else "full"])
        return compare(args, folder, title="Llama-shaped, random weights")


def make_checkpoint(folder: Path, sizes: dict[str, int]) -> None:
    """Layer by layer into shards, so that making it needs little memory."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.helpers.tokenizer import byte_tokenizer

    heads = sizes["hidden_size"] // 128
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads // 2, dtype="float32")
    config.architectures = ["LlamaForCausalLM"]
    needed = 4 * (12 * sizes["hidden_size"] * sizes["intermediate_size"] * sizes["num_hidden_layers"])
    folder.mkdir(parents=True)
    if shutil.disk_usage(folder).free < 3 * needed:
        raise BenchError(f"{folder} needs {3 * needed / 1e9:.0f} GB: give another place with --scratch")
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    shards: dict[str, dict[str, torch.Size]] = {}
    count = sizes["num_hidden_layers"] + 1
    for name, shape in shapes.items():
        part = int(name.split(".")[2]) + 1 if name.startswith("model.layers.") else count
        shards.setdefault(f"model-{part:05}-of-{count:05}.safetensors", {})[name] = shape
    torch.manual_seed(0)
    places: dict[str, str] = {}
    for file, of_file in shards.items():
        tensors = {n: torch.ones(s) if len(s) == 1 else torch.randn(s) * s[-1] ** -0.5 for n, s in of_file.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(of_file, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def compare(args: argparse.Namespace, folder: Path, *, title: str) -> Report:
    """Every run in a process of its own, one after the other."""
    weights = sum(tensor_bytes(file) for file in folder.glob("*.safetensors"))
    budget = weights // 4
    report = Report("weight_streaming")
    rivals = ("accelerate", "accelerate-cold", "airllm", "airllm-cold", "streamed-again")
    found: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for role in ("resident", "streamed", *(rivals if args.part == "large" else ())):
        for capped in (True, False):
            job = {"model": str(folder), "tokens": args.tokens, "budget": budget, "capped": capped}
            code = f"from benchmarks.offload.weight_streaming import play; play({role!r}, {job!r})"
            ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT")]
            if lines:
                found[role] = json.loads(lines[0].removeprefix("RESULT"))
                found[role]["name"] += "" if capped else ", without the cap"
                say(f"{role}: {found[role]}")
                break
            notes.append(f"{role}: failed: {(ran.stderr.strip().splitlines() or ['?'])[-1][:160]}")
            if role.startswith("streamed"):
                raise BenchError(notes[-1])
    table = report.table(
        f"{weights / 1e6:.0f} MB of weights, budget {budget / 1e6:.0f} MB, {args.tokens} tokens decoded",
        ["run", "tokens/s", "read per token, MB", "peak RSS over the start, MB (of it anonymous)", "logits"],
        dtype="float32",
        model=title,
    )
    for role, result in found.items():
        equal = result["logits"] == found["resident"]["logits"]
        report.failed |= role.startswith("streamed") and not equal
        memory = f"{result['peak_mb']:.0f} ({result['anonymous_mb']:.0f})"
        speed = (f"{result['tokens_per_second']:.2f}", f"{result['read_mb']:.0f}")
        table.add(result["name"], *speed, memory, "equal to the bit" if equal else "differ")
        if role.startswith("streamed"):
            notes.append(
                f"{role}: RLIMIT_DATA {result['limit_mb']:.0f} MB, of which {result['start_mb']:.0f} MB were taken "
                f"before loading; {result['plan']}; achieved {result['achieved']:.2f} GB/s while computing, "
                f"bare {result['bare']:.2f} GB/s: {result['achieved'] / result['bare']:.1%}; "
                f"computing alone would take {result['compute_share']:.0%} of the time"
            )
    report.raw, table.notes = found, notes
    return report


def tensor_bytes(file: Path) -> int:
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


# What runs in the processes.


class Watch:
    """Peak memory of this process and bytes it made the disk read."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
        self._start = memory_status("VmRSS"), memory_status("RssAnon")
        self._anonymous = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.02):
            self._anonymous = max(self._anonymous, memory_status("RssAnon"))

    def stop(self) -> dict[str, float]:
        self._done.set()
        self._thread.join()
        return {
            "peak_mb": (memory_status("VmHWM") - self._start[0]) / 1e6,
            "anonymous_mb": max(0, self._anonymous - self._start[1]) / 1e6,
        }


def _disk_reads() -> int:
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _cap(args: argparse.Namespace) -> dict[str, float]:
    """No more anonymous memory than there is now, the budget, and some headroom."""
    from transformers import AutoTokenizer

    from tests.helpers.models import tiny_model

    AutoTokenizer.from_pretrained(args.model)
    KVBoost(tiny_model("llama"), chunk_size=8).generate([3, 4, 5], max_new_tokens=2)  # everything imported and started
    start = memory_status("VmData")
    limit = start + args.budget + _HEADROOM
    if args.capped:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return {"limit_mb": limit / 1e6, "start_mb": start / 1e6}


@torch.no_grad()
def decode(model: Any, tokens: int, before_each: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """A prompt in one step, then greedy tokens one by one, timed; everything's logits in one digest."""
    ids = torch.tensor([[(i * 7919) % 250 + 3 for i in range(_PROMPT)]])
    hasher = hashlib.sha256()
    output = model(input_ids=ids, use_cache=True)
    seconds, reads = [], []
    for _ in range(tokens):
        hasher.update(output.logits[:, -1].float().numpy().tobytes())
        ids = output.logits[:, -1:].argmax(-1)
        before_each()
        read, begun = _disk_reads(), time.perf_counter()
        output = model(input_ids=ids, past_key_values=output.past_key_values, use_cache=True)
        seconds.append(time.perf_counter() - begun)
        reads.append(_disk_reads() - read)
    hasher.update(output.logits[:, -1].float().numpy().tobytes())
    return {
        "logits": hasher.hexdigest(),
        "tokens_per_second": 1.0 / statistics.median(seconds),
        "seconds": sum(seconds),
        "read_mb": statistics.median(reads) / 1e6,
    }


def resident(args: argparse.Namespace) -> dict[str, Any]:
    args.capped = False
    _cap(args)
    watch = Watch()
    with KVBoost.from_pretrained(str(args.model), dtype="float32", device="cpu") as engine:
        assert streamed_weights_of(engine.model) is None
        return {"name": "resident", **decode(engine.model, args.tokens), **watch.stop()}


def streamed(args: argparse.Namespace) -> dict[str, Any]:
    limits = _cap(args)
    watch = Watch()
    with KVBoost.from_pretrained(
        str(args.model), dtype="float32", device="cpu", weight_budget=args.budget, workspace_bytes=0, cache_bytes=0
    ) as engine:
        streamer = streamed_weights_of(engine.model)
        assert isinstance(streamer, WeightStreamer)
        assert streamer.memory.in_memory <= args.budget
        bare = [link_bandwidth(streamer)]
        before = streamer.stats()
        told = decode(engine.model, args.tokens)
        after = streamer.stats()
        bare.append(link_bandwidth(streamer))
        per_pass = streamer.memory.streamed
        waited = (after.waited_seconds - before.waited_seconds) / told["seconds"] * args.tokens / (args.tokens + 1)
        return {
            "name": "kvboost, streamed",
            **told,
            **limits,
            **watch.stop(),
            "achieved": args.tokens * per_pass / told["seconds"] / 1e9,
            "bare": statistics.mean(bare) / 1e9,
            "compute_share": max(0.0, 1.0 - waited),
            "plan": engine.describe()["weights"],
        }


def link_bandwidth(streamer: WeightStreamer) -> float:
    """Bytes per second of the bare link: what a pass copies, through two buffers, nothing computed beside."""
    size, units = streamer.placement.buffer_bytes, streamer.placement.streamed
    link, source = HostLink(budget=2 * up_to_page(size)), FileSource(streamer.folder)
    buffers = [link.allocate(size) for _ in range(2)]
    begun, copies = time.perf_counter(), list[Any]()
    for number, unit in enumerate(units):
        if number >= 2:
            link.wait(copies[number - 2])
        copies.append(link.copy(source, unit.extent, buffers[number % 2], after=None))
    for copy in copies:
        link.wait(copy)
    taken = time.perf_counter() - begun
    link.close()
    return streamer.memory.streamed / taken


def accelerate(args: argparse.Namespace, *, cold: bool = False) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    _cap(args)
    watch = Watch()
    with tempfile.TemporaryDirectory(dir=args.model.parent) as offload:
        model = AutoModelForCausalLM.from_pretrained(
            args.model,
            dtype=torch.float32,
            device_map="auto",
            max_memory={"cpu": args.budget},
            offload_folder=offload,
        ).eval()
        assert "disk" in model.hf_device_map.values(), "everything fitted"
        drop = partial(_drop, args.model, Path(offload)) if cold else lambda: None
        name = f"accelerate, disk offload{', page cache dropped' if cold else ''}"
        return {"name": name, **decode(model, args.tokens, drop), **watch.stop()}


def airllm(args: argparse.Namespace, *, cold: bool = False) -> dict[str, Any]:
    from airllm import AutoModel

    _cap(args)
    watch = Watch()
    split = args.model.parent / "airllm"
    split.mkdir(exist_ok=True)
    model = AutoModel.from_pretrained(
        str(args.model), device="cpu", dtype=torch.float32, layer_shards_saving_path=str(split), prefetching=True
    )
    drop = partial(_drop, args.model, split) if cold else lambda: None
    name = f"AirLLM, prefetching{', page cache dropped' if cold else ''}"
    return {"name": name, **decode(model, args.tokens, drop), **watch.stop()}


def _drop(*folders: Path) -> None:
    drop_from_page_cache(file for folder in folders for file in folder.rglob("*"))


_ROLES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "resident": resident,
    "streamed": streamed,
    "streamed-again": streamed,
    "accelerate": accelerate,
    "accelerate-cold": lambda args: accelerate(args, cold=True),
    "airllm": airllm,
    "airllm-cold": lambda args: airllm(args, cold=True),
}


def play(role: str, job: dict[str, Any]) -> None:
    """What a process does: one run, whose figures it prints."""
    args = argparse.Namespace(**{**job, "model": Path(job["model"])})
    print("RESULT" + json.dumps(_ROLES[role](args)))


def families() -> Report:
    """Every family the tests know, as small as they are."""
    from tests.helpers.models import FAMILIES, tiny_model
    from tests.helpers.tokenizer import byte_tokenizer

    report = Report("weight_streaming")
    table = report.table("Families: streamed against resident", ["family", "logits and keys"], dtype="float32")
    prompt = [(i * 37) % 90 + 3 for i in range(100)]
    for family, known in FAMILIES.items():
        kinds = {"layer_types": known["layer_types"] * 3} if "layer_types" in known else {}
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_model(family, hidden_size=64, intermediate_size=128, num_hidden_layers=6, **kinds)
            model.save_pretrained(folder)
            budget = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) * 4 // 5
            byte_tokenizer().save_pretrained(folder)
            settings = {"chunk_size": 16, "device": "cpu"}
            logits, roots = [], []
            for given in (None, budget):
                with KVBoost.from_pretrained(folder, weight_budget=given, **settings) as engine:
                    assert (streamed_weights_of(engine.model) is not None) == (given is not None)
                    logits.append([engine.prefill(prompt).logits for _ in range(2)])
                    roots.append(root_key(engine))
            same = all(torch.equal(a, b) for a, b in zip(*logits, strict=True)) and roots[0] == roots[1]
            table.add(family, "equal to the bit, same keys" if same else "DIFFERS")
            report.failed |= not same
    return report
