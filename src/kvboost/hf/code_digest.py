"""Digests of the code that decides the bits of KV: this package's own, and a model's that came with its checkpoint.

Used by the fingerprint. They are digests of the files as they are, comments included: a digest without comments would
need the tokens of every file at every start (0.3 s), and Python's own tree of a file differs between its versions.
Invariant: no two versions of a file in ``DECIDES_BITS`` share a key.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
import uuid
from collections.abc import Iterable, Iterator
from functools import cache, partial
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from kvboost.hf.attention import registered

# Decoding (hf/ragged.py) and approx are not among them: what they compute is marked as not bitwise.
DECIDES_BITS = (
    "hf/attention.py",
    "hf/cache.py",
    "hf/cache_layers.py",
    "hf/codec",
    "hf/environment.py",
    "hf/generate.py",
    "hf/joint.py",
    "hf/layers.py",
    "hf/lower_right.py",
    "hf/numerics",
    "hf/row_pages.py",
    "hf/runner.py",
    "offload/kv",
    "steps.py",
)
"""Files and folders of this package."""
# Versions of the first two are in the key, and so is ``code_digest``. PEFT's layers come and go around a base model.
_KNOWN = {"torch", "transformers", "kvboost", "peft", *sys.stdlib_module_names}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_UNSEEN = uuid.uuid4().hex  # of this process

_log = logging.getLogger(__name__)


@cache
def code_digest() -> str:
    """The digest of this package's code that decides bits; its version where it was installed without its source."""
    hasher = hashlib.sha256()
    try:
        for name, content in _sources():
            hasher.update(f"{name}:{len(content)}:".encode() + content)
    except OSError as error:
        try:
            found = f"version {metadata.version('kvboost')}"
        except metadata.PackageNotFoundError:
            found = f"process {_UNSEEN}"
        _log.info("the package's source cannot be read (%s): keys name its %s instead", error, found)
        return found
    return hasher.hexdigest()


def _sources() -> Iterator[tuple[str, bytes]]:
    """In a wheel, a checkout or a zip file alike."""
    package = resources.files("kvboost")
    for name in DECIDES_BITS:
        found = package.joinpath(name)
        files = [found] if name.endswith(".py") else sorted(found.iterdir(), key=lambda file: file.name)
        for file in files:
            if file.name.endswith(".py"):
                yield f"{name}/{file.name}", file.read_bytes()


def model_code_digest(model: Any) -> str:
    """The digest of the files of a model's classes that no installed version names; ``"none"`` if there are none.

    Such are ``trust_remote_code`` classes, a user's own, those of quantisation libraries, and what took the place of a
    ``forward``. Not seen: what a function closes over, and what its file imports. A model with a user's hooks, or a
    compiled one, has a digest of its own each time.
    """
    modules = list(model.modules())
    classes = {base for kind in {type(module) for module in modules} for base in kind.__mro__}
    forwards = [one.__dict__["forward"] for one in (*classes, *modules) if "forward" in one.__dict__]
    if any(map(_is_foreign, hooks_of(modules))) or any(map(is_compiled, (*modules, *forwards))):
        _log.warning("this model has hooks of yours, or is compiled: its KV serves this engine alone")
        return f"engine {uuid.uuid4().hex}"  # a hook may do anything with what it closes over
    return _digest([*classes, *forwards])


def hooks_of(modules: Iterable[Any]) -> list[Any]:
    """What runs before and after the forwards of these modules."""
    return [hook for module in modules for name in _HOOKS for hook in getattr(module, name).values()]


def is_compiled(code: Any) -> bool:
    """Whether this is a module that was compiled, or a forward that ``torch.compile`` made."""
    return getattr(code, "_compiled_call_impl", None) is not None or hasattr(code, "_torchdynamo_orig_callable")


def attention_code_digest(name: str) -> str:
    """The same as of a model's classes, of the attention that is registered under this name."""
    return _digest(registered(name))


def _digest(code: Iterable[Any]) -> str:
    found = sorted({source for one in code if _is_foreign(one) for source in _sources_of(one)})
    return hashlib.sha256("".join(found).encode()).hexdigest() if found else "none"


def _is_foreign(code: Any) -> bool:
    """Whether no installed version names this code."""
    return _home(code).partition(".")[0] not in _KNOWN


def _home(code: Any) -> str:
    """The name of the module that has this code: of a function's wrapper, whatever name that took over."""
    code = code.func if isinstance(code, partial) else code
    scope = getattr(code, "__globals__", None)
    return str(scope.get("__name__", "") if scope is not None else code.__module__)


def _sources_of(code: Any) -> Iterator[str]:
    """Digests of the file that has this code and of what it imports beside it; of the code alone if it has no file."""
    code = code.func if isinstance(code, partial) else code
    file = getattr(sys.modules.get(home := _home(code)), "__file__", None)
    try:
        if file is None:
            yield hashlib.sha256(inspect.getsource(code).encode()).hexdigest()
            return
        yield hashlib.sha256(Path(file).read_bytes()).hexdigest()
        if home.startswith("transformers_modules."):
            for beside in get_relative_import_files(file):
                yield hashlib.sha256(Path(beside).read_bytes()).hexdigest()
    except (OSError, TypeError) as error:
        _log.info("the code of %s cannot be read (%s): its KV serves this process alone", code, error)
        yield _UNSEEN


code_digest()  # of the files as they are imported: a checkout may be pulled under a running process
