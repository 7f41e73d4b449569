"""Runs models whose weights are four times their budget, next to the resident run and to other offloaders.

usage: python -m proofs.streaming families | large | smollm2 | awq [--model FOLDER] [--quick] [--scratch FOLDER]

``families``: tiny models of 18 families, streamed and resident: the same logits to the bit. ``large`` makes a
Llama-shaped checkpoint of random weights (2.7 GB) and runs it in processes of its own: resident; streamed with a
quarter of the weights, anonymous memory capped with RLIMIT_DATA and reads past the page cache; accelerate's disk
offload and AirLLM (if installed), with the same cap if they can. Rivals read through the page cache: once as it comes,
once with their files dropped from it before each token, as if the RAM were as small as the budget says. ``awq``
quantises SmolLM2 into AWQ's layout and runs that next to the same numbers made whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
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
from pathlib import Path
from typing import Any

import torch

from kvboost import KVBoost
from kvboost.bench.report import describe_machine
from kvboost.offload.weights import streamer_of

_ROOM = 200 * 10**6  # beside the weights: activations, KV, stacks of threads, digests at loading
_PROMPT = 24
_SIZES = {
    "full": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 26, "vocab_size": 8000},
    "quick": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "vocab_size": 8000},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["families", "large", "smollm2", "awq", "child"])
    parser.add_argument("--model", type=Path, help="for smollm2 and awq: its folder")
    parser.add_argument("--quick", action="store_true", help="a smaller checkpoint and fewer tokens")
    parser.add_argument("--tokens", type=int, default=0, help="to decode in each run")
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where to make the checkpoint"
    )
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--uncapped", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "families":
        families()
    elif args.what == "child":
        print("RESULT" + json.dumps(_ROLES[args.role](args)))
    elif args.what in ("smollm2", "awq") and args.model is None:
        parser.error(f"{args.what} needs --model FOLDER")
    elif args.what == "awq":
        awq(args)
    elif args.what == "smollm2":
        args.tokens = args.tokens or (4 if args.quick else 32)
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            folder = Path(scratch) / "model"
            shutil.copytree(args.model.expanduser(), folder)
            compare(args, folder, title="SmolLM2, a quarter of its weights")
    else:
        args.tokens = args.tokens or (3 if args.quick else 8)
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            folder = Path(scratch) / "model"
            make_checkpoint(folder, _SIZES["quick" if args.quick else "full"])
            compare(args, folder, title="Llama-shaped, random weights")


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
        raise SystemExit(f"{folder} needs {3 * needed / 1e9:.0f} GB: give another place with --scratch")
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


def compare(args: argparse.Namespace, folder: Path, *, title: str) -> None:
    """Every run in a process of its own, one after the other."""
    weights = sum(_tensor_bytes(file) for file in folder.glob("*.safetensors"))
    budget = weights // 4
    print(describe_machine(dtype="float32", model=title).line, flush=True)
    found = {}
    rivals = (
        ("accelerate", "accelerate-cold", "airllm", "airllm-cold", "streamed-again") if args.what == "large" else ()
    )
    for role in ("resident", "streamed", *rivals):
        command = [sys.executable, "-m", "proofs.streaming", "child", "--role", role, "--model", str(folder)]
        command += ["--tokens", str(args.tokens), "--budget", str(budget)]
        for uncapped in ([], ["--uncapped"]):
            run = subprocess.run([*command, *uncapped], capture_output=True, text=True, check=False)
            lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
            if lines:
                found[role] = json.loads(lines[0].removeprefix("RESULT"))
                found[role]["name"] += ", without the cap" if uncapped else ""
                print(f"{role}: {found[role]}", file=sys.stderr, flush=True)
                break
            print(f"\n{role}: failed: {(run.stderr.strip().splitlines() or ['?'])[-1][:160]}", flush=True)
            if role.startswith("streamed"):
                raise SystemExit(1)
    print(f"\n{title}: {weights / 1e6:.0f} MB of weights, budget {budget / 1e6:.0f} MB, {args.tokens} tokens decoded\n")
    print("| run | tokens/s | read per token, MB | peak RSS over the start, MB (of it anonymous) | logits |")
    print("|---|---:|---:|---:|---|")
    for role, result in found.items():
        equal = "equal to the bit" if result["logits"] == found["resident"]["logits"] else "differ"
        print(
            f"| {result['name']} | {result['tokens_per_second']:.2f} | {result['read_mb']:.0f} | "
            f"{result['peak_mb']:.0f} ({result['anonymous_mb']:.0f}) | {'-' if role == 'resident' else equal} |"
        )
    for role in ("streamed", "streamed-again"):
        if role in found:
            result = found[role]
            print(
                f"\n{role}: RLIMIT_DATA {result['limit_mb']:.0f} MB, of which {result['start_mb']:.0f} MB were taken "
                f"before loading; {result['plan']}; achieved {result['achieved']:.2f} GB/s while computing, "
                f"bare {result['bare']:.2f} GB/s: {result['achieved'] / result['bare']:.1%}; "
                f"computing alone would take {result['compute_share']:.0%} of the time"
            )


def _tensor_bytes(file: Path) -> int:
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


# What runs in the processes.


class Watch:
    """Peak memory of this process and bytes it made the disk read."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
        self._start = _status("VmRSS"), _status("RssAnon")
        self._anonymous = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.02):
            self._anonymous = max(self._anonymous, _status("RssAnon"))

    def stop(self) -> dict[str, float]:
        self._done.set()
        self._thread.join()
        return {
            "peak_mb": (_status("VmHWM") - self._start[0]) / 1e6,
            "anonymous_mb": max(0, self._anonymous - self._start[1]) / 1e6,
        }


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _disk_reads() -> int:
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _cap(args: argparse.Namespace) -> dict[str, float]:
    """No more anonymous memory than there is now, the budget, and some room."""
    from transformers import AutoTokenizer

    from tests.helpers.models import tiny_model

    AutoTokenizer.from_pretrained(args.model)
    KVBoost(tiny_model("llama"), chunk_size=8).generate([3, 4, 5], max_new_tokens=2)  # everything imported and started
    start = _status("VmData")
    limit = start + args.budget + _ROOM
    if not args.uncapped:
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
    args.uncapped = True
    _cap(args)
    watch = Watch()
    with KVBoost.from_pretrained(str(args.model), dtype="float32", device="cpu") as engine:
        assert streamer_of(engine.model) is None
        return {"name": "resident", **decode(engine.model, args.tokens), **watch.stop()}


def streamed(args: argparse.Namespace) -> dict[str, Any]:
    limits = _cap(args)
    watch = Watch()
    with KVBoost.from_pretrained(
        str(args.model), dtype="float32", device="cpu", weight_budget=args.budget, workspace_bytes=0, cache_bytes=0
    ) as engine:
        streamer = streamer_of(engine.model)
        assert streamer is not None
        assert streamer.plan.peak_bytes <= args.budget
        bare = [streamer.link_bandwidth()]
        before = streamer.stats()
        told = decode(engine.model, args.tokens)
        after = streamer.stats()
        bare.append(streamer.link_bandwidth())
        per_pass = streamer.plan.streamed_bytes
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
        drop = _dropping(args.model, Path(offload)) if cold else lambda: None
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
    drop = _dropping(args.model, split) if cold else lambda: None
    name = f"AirLLM, prefetching{', page cache dropped' if cold else ''}"
    return {"name": name, **decode(model, args.tokens, drop), **watch.stop()}


def _dropping(*folders: Path) -> Callable[[], None]:
    """Takes these folders' files out of the page cache, as far as nobody has them mapped."""

    def drop() -> None:
        for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    return drop


_ROLES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "resident": resident,
    "streamed": streamed,
    "streamed-again": streamed,
    "accelerate": accelerate,
    "accelerate-cold": lambda args: accelerate(args, cold=True),
    "airllm": airllm,
    "airllm-cold": lambda args: airllm(args, cold=True),
}


@torch.no_grad()
def awq(args: argparse.Namespace) -> None:
    """SmolLM2 in 4 bits, in memory and streamed, against a model of the numbers its checkpoint stands for."""
    from transformers import AutoModelForCausalLM

    from tests.helpers.awq import save_awq

    prompts = [
        [(i * 7919 + seed * 31) % 40_000 + 3 for i in range(length)] for seed, length in enumerate((8, 16, 17, 200))
    ]
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch) / "awq"
        source = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        save_awq(source, folder, group=64)
        for file in args.model.glob("*token*"):
            shutil.copy(file, folder)
        layers = sum(p.numel() for name, p in source.named_parameters() if ".layers." in name) * 9 // 16
        rest = sum(p.numel() for name, p in source.named_parameters() if ".layers." not in name)
        exact = [source(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]

        def error(logits: list[torch.Tensor]) -> float:
            return max(float((f.float() - e).norm() / e.norm()) for f, e in zip(logits, exact, strict=True))

        print(describe_machine(dtype="float32 and bfloat16", model=str(args.model)).line)
        print("\nLargest relative error of the logits of 4 prompts against the same numbers whole in float32:\n")
        print("| dtype | weights | error | the same numbers whole in this dtype | tokens/s |\n|---|---|---:|---:|---:|")
        for dtype in (torch.float32, torch.bfloat16):
            whole = source.to(dtype)
            floor = error([whole(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
            for budget in (rest * dtype.itemsize + layers // 3, 10**12):
                with KVBoost.from_pretrained(
                    str(folder), dtype=dtype, device="cpu", weight_budget=budget, chunk_size=4096, chunking="fixed"
                ) as engine:
                    found = error([engine.prefill(prompt).logits for prompt in prompts])
                    speed = decode(engine.model, 8)["tokens_per_second"]
                    where = engine.describe()["weights"]
                print(f"| {dtype} | {where} | {found:.1e} | {floor:.1e} | {speed:.1f} |", flush=True)


def families() -> None:
    """Every family the tests know, as small as they are."""
    from tests.helpers.models import FAMILIES, tiny_model
    from tests.helpers.tokenizer import byte_tokenizer

    prompt = [(i * 37) % 90 + 3 for i in range(100)]
    for family, known in FAMILIES.items():
        kinds = {"layer_types": known["layer_types"] * 3} if "layer_types" in known else {}
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_model(family, hidden_size=64, intermediate_size=128, num_hidden_layers=6, **kinds)
            model.save_pretrained(folder)
            most = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) * 4 // 5
            byte_tokenizer().save_pretrained(folder)
            settings = {"chunk_size": 16, "device": "cpu"}
            logits, roots = [], []
            for budget in (None, most):
                with KVBoost.from_pretrained(folder, weight_budget=budget, **settings) as engine:
                    assert (streamer_of(engine.model) is not None) == (budget is not None)
                    logits.append([engine.prefill(prompt).logits for _ in range(2)])
                    assert engine._parts is not None
                    roots.append(engine._parts.reader.names.root())
            same = all(torch.equal(a, b) for a, b in zip(*logits, strict=True)) and roots[0] == roots[1]
            print(f"{family:<14}{'equal to the bit, same keys' if same else 'DIFFERS'}", flush=True)
            if not same:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
