"""``kvboost doctor``: what this machine and a model allow, what fits, and what to change.

Called by :mod:`kvboost.cli.main`, which turns errors into one line. Invariant: the estimate is told before the model is
loaded, and a model that does not fit is not loaded at all.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata, util
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost import __version__
from kvboost.cli.flags import with_settings
from kvboost.cli.output import note, size
from kvboost.cli.settings import Settings
from kvboost.errors import EXTRAS, ConfigError, with_extra

if TYPE_CHECKING:
    from kvboost.engine import KVBoost
    from kvboost.engine.forecast import Forecast, Option

_WIDTH = 20
_TEST_TOKENS = 96
_TEST_BOUNDARY = 64
_TEST_NEW = 8

_Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Folder or hub name; without one, only the machine is described."),
]


@with_settings()
def doctor(
    model: _Model = None,
    *,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Plan for this many tokens, prompt and answer (4096 if left out)."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Plan for this many requests side by side.")] = 1,
    load: Annotated[bool, typer.Option("--load/--no-load", help="Load the model and try it, or only estimate.")] = True,
    settings: Settings,
) -> None:
    """Show what this machine and a model allow: which reuse, what fits into memory, how fast, and what to change."""
    if model is None:
        _print_report(machine())
        return
    forecast, reason = None, ""
    note(f"estimating {model}")
    try:
        forecast = _forecast(model, context=context, batch=batch, settings=settings)
    except ConfigError as error:
        reason = str(error)  # a model may run that cannot be estimated; if it cannot, loading says why
        if not load:
            raise
    fits = forecast is None or _loads(forecast)
    if load and fits:
        from kvboost.engine import KVBoost

        note(f"loading {model}")
        with KVBoost.from_pretrained(model, **{"strict": False, **settings.engine()}) as engine:
            report = engine.describe()
            note("testing")
            report["self-test"] = self_test(engine)
            report["attention"] = str(engine.model.config._attn_implementation)
            _print_report(report)
            tiles = engine.parts.runner.tiles
            if forecast is not None and tiles is not None:
                forecast = forecast.with_packed(tiles.packed_bytes)
    elif forecast is not None:
        report = {"attention": forecast.model.attention, "dtype": str(forecast.model.dtype)}
        report["self-test"] = "not run: " + ("as asked" if fits else "the model does not fit into memory")
        _print_report(report)
    if forecast is None:
        _print_report({"memory estimate": f"none: {reason}"})
        return
    print()
    _print_estimate(forecast)


def machine() -> dict[str, str]:
    """What there is to run models with."""
    import torch

    from kvboost.hf.device_memory import memory_available

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report = {
        "machine": f"{platform.system()} {platform.machine()}, {cores} cores",
        "memory": f"{size(memory_available())} free",
        "accelerator": str(accelerator or "none: models run on the CPU"),
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "transformers": metadata.version("transformers"),
        "kvboost": __version__,
    }
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if util.find_spec(module) is None]
        report[f"[{extra}]"] = f"missing: {with_extra(extra)}" if missing else "installed"
    return report


def self_test(engine: KVBoost) -> str:
    """Run a short prompt twice: the second time from the cache, with the same tokens."""
    vocab = engine.model.get_input_embeddings().weight.shape[0]
    tokens = [(i * 7919 + 11) % vocab for i in range(_TEST_TOKENS)]
    options: dict[str, Any] = {"boundaries": [_TEST_BOUNDARY], "max_new_tokens": _TEST_NEW, "temperature": 0}
    first, second = engine.generate(tokens, **options), engine.generate(tokens, **options)
    if first.token_ids != second.token_ids:
        return "FAILED: the same prompt gave other tokens from the cache; please report this model"
    if not second.reuse.exact_tokens:
        return f"nothing was reused: {second.reuse.reason or 'the cache is too small (cache_bytes)'}"
    bits = "bit for bit" if second.reuse.bitwise else "approximately, as kv_cache_bits asks"
    return (
        f"passed: of {_TEST_TOKENS} prompt tokens, {second.reuse.exact_tokens} came from the cache {bits}, "
        f"and the {len(second.token_ids)} new tokens were the same"
    )


def _forecast(model: str, *, context: int | None, batch: int, settings: Settings) -> Forecast:
    from kvboost.config import EngineConfig, parse_bytes
    from kvboost.engine.forecast import forecast
    from kvboost.hf.loading import ModelSource

    given = settings.engine()
    dtype, device = given.pop("dtype", "auto"), given.pop("device", None)
    named = {"revision": given.pop("revision")} if "revision" in given else {}
    budget, _ = given.pop("weight_budget", None), given.pop("weight_dir", None)
    return forecast(
        ModelSource(model, dtype=dtype, device=device, model_kwargs=named),
        EngineConfig(**given),
        context=context,
        batch=batch,
        weight_budget=parse_bytes(budget, name="weight_budget") if budget is not None else None,
    )


def _loads(forecast: Forecast) -> bool:
    """Whether the weights fit, whatever the caches and the requests may grow to: the self-test's are short."""
    estimate = forecast.estimate
    return estimate.weights.in_memory + estimate.weights.converted_from + estimate.runtime <= forecast.machine.available


def _print_report(report: Mapping[str, str]) -> None:
    for name, value in report.items():
        print(f"{name:<{_WIDTH}}{value}")


def _print_estimate(forecast: Forecast) -> None:
    estimate, shape = forecast.estimate, forecast.model.shape
    print(f"Memory for {estimate.batch} x {estimate.context} tokens, with all caches full:")
    for name, count in estimate.lines().items():
        print(f"  {name:<30}{size(count):>12}")
    print(f"  {'peak':<30}{size(estimate.peak):>12}   of {size(forecast.machine.available)} that this process may take")
    if estimate.disk_bytes:
        print(f"  {'on disk':<30}{size(estimate.disk_bytes):>12}")
    if shape.max_positions is not None and estimate.context > shape.max_positions:
        print(f"The model was made for {shape.max_positions} tokens: a longer context is refused.")
    print()
    rates = forecast.machine.rates
    print(
        f"Measured here: memory {rates.memory / 1e9:.1f} GB/s, disk {rates.disk / 1e9:.2f} GB/s, "
        f"{rates.multiply / 1e9:.0f} GFLOP/s. Tokens/s are upper bounds, for all requests together."
    )
    print(f"{'':<24}{'peak':>10}  {'fits':<5}{'prefill':>9}{'decode':>10}  settings")
    for option in forecast.options:
        print(_row(option))
    print()
    print(f"{'what to change':<{_WIDTH}}{_advice(forecast)}")


def _row(option: Option) -> str:
    speed = option.speed
    rates = f"{speed.prefill:>9.0f}{speed.decode:>10.1f}"
    fits = "yes" if option.fits else "no"
    return f"{option.name:<24}{size(option.estimate.peak):>10}  {fits:<5}{rates}  {_flags(option)}".rstrip()


def _flags(option: Option) -> str:
    """What to change, as it is typed: ``kv_bytes=25MB`` is ``--kv-bytes 25MB``."""
    settings = (part.split("=") for part in option.change.split(", ") if part)
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings)


def _advice(forecast: Forecast) -> str:
    """The way to run it that fits and is fastest."""
    asked, *others = forecast.options
    if asked.fits:
        return "nothing: it fits as asked"
    fitting = [option for option in others if option.fits]
    if not fitting:
        return "nothing listed fits: lower --context or --batch, or take a smaller model"
    best = max(fitting, key=lambda option: option.speed.decode)
    return f"{best.name}: {_flags(best)}"
