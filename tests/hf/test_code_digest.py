"""The code that decides bits is in the key: this package's, and what comes with a model."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama.modeling_llama import LlamaMLP

import kvboost
from kvboost.hf import code_digest as module
from kvboost.hf.code_digest import DECIDES_BITS, code_digest, model_code_digest
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.probe import probe_model
from tests.helpers.models import tiny_model

_PACKAGE = Path(kvboost.__file__).parent
# Reached by imports, but without a say in how a position's KV is computed.
_DECIDE_NO_BITS = {
    "capacity",  # how long a step is: in tiles that changes no bits
    "config",
    "core",  # which positions are computed, never how
    "direct_io",
    "errors",
    "hf/checkpoint.py",
    "hf/code_digest.py",  # it names what does
    "hf/device_memory.py",
    "hf/packed_weights.py",  # what is tested in tiles: how a model is stepped is in the key
    "hf/peft_layers.py",
    "hf/probe.py",
    "hf/streams.py",  # when bytes are copied
    "hf/weights.py",
    "streams",
    "types",
}


@pytest.fixture(autouse=True)
def _uncached() -> Iterator[None]:
    code_digest.cache_clear()
    yield
    code_digest.cache_clear()


def _copy(folder: Path) -> Path:
    for name in DECIDES_BITS:
        source, target = _PACKAGE / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return folder


def _digest_of(package: Any, patch: pytest.MonkeyPatch) -> str:
    code_digest.cache_clear()
    patch.setattr(module.resources, "files", lambda name: package)
    return code_digest()


def test_every_file_that_decides_bits_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = code_digest()
    package = _copy(tmp_path / "package")
    assert _digest_of(package, monkeypatch) == installed
    found = {installed}
    for file in package.rglob("*.py"):
        before = file.read_bytes()
        file.write_bytes(before.replace(b"1", b"2", 1) + b"\n")
        found.add(_digest_of(package, monkeypatch))
        file.write_bytes(before)
    assert len(found) == 1 + len(list(package.rglob("*.py"))) > len(DECIDES_BITS)


def test_a_zip_file_has_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = code_digest()
    package = _copy(tmp_path / "package")
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as zipped:
        for file in package.rglob("*.py"):
            zipped.write(file, file.relative_to(package))
    assert _digest_of(zipfile.Path(tmp_path / "package.zip"), monkeypatch) == installed


def test_without_source_the_version_identifies_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "7.0")
    assert _digest_of(tmp_path, monkeypatch) == "version 7.0"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert _digest_of(tmp_path, monkeypatch).startswith("process ")


def test_every_module_on_the_way_of_a_step_is_known() -> None:
    """A new module that listed ones import is either listed too, or said to decide no bits."""
    assert all((_PACKAGE / name).exists() for name in DECIDES_BITS)
    files = [file for name in DECIDES_BITS for file in _files(_PACKAGE / name)]
    imported = {name for file in files for name in _imports(file)}
    unknown = {name for name in imported if not _within(name, (*DECIDES_BITS, *_DECIDE_NO_BITS))}
    assert not unknown, "add them to DECIDES_BITS of kvboost/hf/code_digest.py, or to _DECIDE_NO_BITS here"


def _files(path: Path) -> list[Path]:
    return [*path.glob("*.py")] if path.is_dir() else [path]


def _imports(file: Path) -> Iterator[str]:
    """Modules of this package, as ``hf/cache``."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvboost."):
            base = str(node.module).removeprefix("kvboost.").replace(".", "/")
            names = [f"{base}/{alias.name}" for alias in node.names if (_PACKAGE / base / f"{alias.name}.py").exists()]
            yield from names or [base]


def _within(name: str, listed: tuple[str, ...]) -> bool:
    return any(name == one.removesuffix(".py") or name.startswith(f"{one}/") for one in listed)


def test_the_digest_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    layout = probe_model(model).layout
    before = ModelIdentity(model, layout).snapshot().fields["numerics"]
    assert f"code={code_digest()},none|" in before
    monkeypatch.setattr("kvboost.hf.fingerprint.code_digest", lambda: "other")
    assert ModelIdentity(model, layout).snapshot().fields["numerics"] != before


_MODELLING = """
from transformers import LlamaConfig, LlamaForCausalLM

from .scaling_of_{name} import SCALE


class Scaled(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * SCALE
        return output
"""


def test_code_that_comes_with_a_model_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a file that only its modelling file imports; the tokenizer's code is not."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = []
    for number, scale in enumerate((2.0, 2.0, 3.0)):
        name = f"remote{number}"
        folder = tmp_path / name
        tiny_model("llama").save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_scaled.Scaled"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "modeling_scaled.py").write_text(_MODELLING.format(name="scaled"))
        (folder / "scaling_of_scaled.py").write_text(f"SCALE = {scale}\n")
        (folder / "tokenization_scaled.py").write_text(f"NUMBER = {number}\n")
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules.")
        found.append(ModelIdentity(model, probe_model(model).layout).snapshot().fields["numerics"])
    assert found[0] == found[1] != found[2]


class Doubling(torch.nn.Linear):
    """A user's own layer."""


def test_classes_of_the_users_own_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(Doubling(2, 2))
    from_file = model_code_digest(model)
    assert re.fullmatch("[0-9a-f]{64}", from_file)
    monkeypatch.delattr(sys.modules[__name__], "__file__")  # as in a notebook
    from_source = model_code_digest(model)
    assert from_source != from_file
    assert from_source == model_code_digest(model)
    made = type("Made", (torch.nn.Module,), {"__module__": "nowhere"})()
    assert model_code_digest(made) == model_code_digest(made), "for this process"
    assert model_code_digest(torch.nn.Linear(2, 2)) == "none"


_FUNCTION = """
import functools

def make(right):
    @functools.wraps(right)
    def changed(*args, **kwargs):
        return right(*args, **kwargs)
    return changed
"""


def _imported(file: Path, text: str) -> Any:
    """The function ``make`` of a user's module with this text."""
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made.make


def _patch_class(patch: pytest.MonkeyPatch, make: Any) -> Any:
    patch.setattr(LlamaMLP, "forward", make(LlamaMLP.forward))
    return tiny_model("llama")


def _patch_instance(patch: pytest.MonkeyPatch, make: Any) -> Any:
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    mlp.forward = functools.partial(make(LlamaMLP.forward), mlp)
    return model


def _register_attention(patch: pytest.MonkeyPatch, make: Any) -> Any:
    patch.setitem(AttentionInterface._global_mapping, "mine", make(sdpa_attention_forward))
    patch.setitem(AttentionMaskInterface._global_mapping, "mine", sdpa_mask)
    model = tiny_model("llama")
    model.set_attn_implementation("mine")
    return model


def _register_mask(patch: pytest.MonkeyPatch, make: Any) -> Any:
    patch.setitem(AttentionInterface._global_mapping, "mine", sdpa_attention_forward)
    patch.setitem(AttentionMaskInterface._global_mapping, "mine", make(sdpa_mask))
    model = tiny_model("llama")
    model.set_attn_implementation("mine")
    return model


@pytest.mark.parametrize("way", [_patch_class, _patch_instance, _register_attention, _register_mask])
def test_functions_of_the_users_own_are_in_the_key(way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for text in (_FUNCTION, _FUNCTION, _FUNCTION + "# changed"):
        with monkeypatch.context() as patch:
            model = way(patch, _imported(tmp_path / "functions_of_mine.py", text))
            found.append(dict(ModelIdentity(model, probe_model(model).layout).snapshot().fields))
    del sys.modules["functions_of_mine"]
    assert found[0] == found[1] != found[2]


def test_an_attention_chosen_later_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    identity = ModelIdentity(model, probe_model(model).layout)
    patch = monkeypatch.setitem
    patch(AttentionMaskInterface._global_mapping, "mine", sdpa_mask)
    patch(AttentionInterface._global_mapping, "mine", sdpa_attention_forward)
    model.set_attn_implementation("mine")
    before = identity.snapshot().fields
    model.set_attn_implementation("sdpa")
    identity.snapshot()
    make = _imported(tmp_path / "functions_of_mine.py", _FUNCTION)
    patch(AttentionInterface._global_mapping, "mine", make(sdpa_attention_forward))
    model.set_attn_implementation("mine")
    assert identity.snapshot().fields != before
    del sys.modules["functions_of_mine"]


def test_the_digest_is_of_the_code_that_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that is pulled under a running process changes the files, not what runs."""
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    monkeypatch.setattr(again, "DECIDES_BITS", DECIDES_BITS[:1])
    assert again.code_digest() == code_digest()


def _add_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, out: out)


def _add_pre_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, given: None)


def _compile(model: Any) -> None:
    model.model.layers[0].compile()


def _compile_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward)


@pytest.mark.parametrize("change", [_add_hook, _add_pre_hook, _compile, _compile_forward])
def test_kv_of_a_model_with_hooks_or_compiled_is_for_one_engine(change: Any) -> None:
    """What a hook adds may be in a tensor that it closes over."""
    plain, changed = tiny_model("llama"), tiny_model("llama")
    change(changed)
    found = [ModelIdentity(model, probe_model(plain).layout).snapshot().fields for model in (plain, changed, changed)]
    assert len({fields["numerics"] for fields in found}) == 3


def test_an_attention_registered_again_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = monkeypatch.setitem
    patch(AttentionMaskInterface._global_mapping, "mine", sdpa_mask)
    patch(AttentionInterface._global_mapping, "mine", sdpa_attention_forward)
    model = tiny_model("llama")
    model.set_attn_implementation("mine")
    identity = ModelIdentity(model, probe_model(model).layout)
    before = identity.snapshot()
    patch(
        AttentionInterface._global_mapping, "mine", _imported(tmp_path / "mine.py", _FUNCTION)(sdpa_attention_forward)
    )
    assert not identity.is_current(before)
    assert identity.snapshot().fields["attention"] != before.fields["attention"]
    del sys.modules["mine"]
