"""The adapters of one model: loads and identifies them, and serializes requests for different ones.

Used by the engine, which runs every forward inside :meth:`Adapters.using`. Works with a model that PEFT wrapped
(``PeftModel``) and with Transformers' own ``load_adapter``. Invariant: this class never changes
the model while a request runs; afterwards the model uses the adapters it used before.
"""

from __future__ import annotations

import enum
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from kvboost.errors import ConfigError, with_extra
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.peft_layers import AdapterChoice, active_adapters, choose_adapter, refuse_merged, watch_merges


class AsSet(enum.Enum):
    """The adapters that the model currently uses."""

    AS_SET = enum.auto()


AS_SET: Final = AsSet.AS_SET
AdapterName = str | None | Literal[AsSet.AS_SET]
"""An adapter's name, None for the base model, or ``AS_SET`` for what :meth:`Adapters.use` or the user has set."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def check_adapter(name: str, path_or_id: str, *, subfolder: str | None = None) -> None:
    """Raise ConfigError if this is no adapter's folder and no name on the hub. Needs no model."""
    folder = Path(path_or_id)
    if not folder.exists():
        if _HUB_NAME.fullmatch(path_or_id) is None:
            raise ConfigError(f"adapter {name!r}: there is no folder {path_or_id}; check the path")
    elif not (folder / (subfolder or "") / "adapter_config.json").is_file():
        raise ConfigError(
            f"adapter {name!r}: {path_or_id} holds no adapter_config.json; give the folder that PEFT's save_pretrained "
            "wrote"
        )


class Adapters:
    """Manages the adapters of one model. Thread-safe."""

    def __init__(self, model: Any, identity: ModelIdentity) -> None:
        self._model, self._identity = model, identity
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._running = 0
        self._in_use: AdapterName = AS_SET
        """The adapter of the running requests."""
        self._before: AdapterChoice | None = None
        """The choice to restore when they end."""
        self._thread_state = threading.local()
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Counts changes made through this class: KV of an earlier epoch may be another model's."""
        return self._epoch

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that are loaded."""
        return tuple(getattr(self._model, "peft_config", None) or ())

    @property
    def active(self) -> tuple[str, ...]:
        """The adapters in use now; empty for the base model."""
        return active_adapters(self._model)

    def digest(self, name: str) -> str:
        """The digest of an adapter's tensors: the same for the same adapter under another name."""
        self._check_known(name)
        return self._identity.adapter_digest(name)

    def load(self, name: str, path_or_id: str, *, replace: bool = False, **load_kwargs: Any) -> str:
        """Load an adapter from a folder or the hub and return its digest; ``use`` or ``using`` chooses it.

        ``replace`` overwrites a loaded adapter in place (LoRA only). Waits for running requests. Everything else
        goes to PEFT's or Transformers' own ``load_adapter``.
        """
        with self._exclusive():
            if not replace and name in self.names:
                raise ConfigError(f"an adapter {name!r} is loaded; give another name, or replace=True to overwrite it")
            if replace:
                self._check_known(name)
            check_adapter(name, str(path_or_id), subfolder=load_kwargs.get("subfolder"))
            refuse_merged(self._model)
            before, active = AdapterChoice(self._model), self.active
            try:
                self._load(name, str(path_or_id), replace=replace, load_kwargs=load_kwargs)
            except ImportError as error:
                raise ConfigError(f"adapters need the peft package ({error}); {with_extra('adapters')}") from error
            except (OSError, ValueError, RuntimeError) as error:
                if not replace and name in self.names:
                    self._model.delete_adapter(name)  # half of it would answer as if it were whole
                where = str(path_or_id) if Path(path_or_id).exists() else f"{path_or_id} (no folder here) on the hub"
                raise ConfigError(
                    f"cannot load adapter {name!r} from {where}: {error}; check the path, and that the adapter was "
                    "made for this model"
                ) from error
            finally:
                # Even a partly loaded adapter has changed tensors. Overwritten ones keep their versions and addresses.
                self._identity.weights_changed(adapter=name)
                self._epoch += 1
                choose_adapter(self._model, active[0] if active else None)  # for new layers, which ``before`` lacks
                before.restore()
            return self._identity.adapter_digest(name)

    def use(self, name: str | None) -> None:
        """Let the model use this adapter from now on; None is the base model. Waits for running requests."""
        with self._exclusive():
            if name is not None:
                self._check_known(name)
                self._model.set_adapter(name)
            choose_adapter(self._model, name)
            self._epoch += 1

    @contextmanager
    def using(self, name: AdapterName = AS_SET) -> Iterator[None]:
        """Run the model under this adapter; afterwards it uses what it used before.

        Requests for the same adapter run concurrently; those for different adapters run in order of arrival.
        A thread may nest requests for the same adapter.
        """
        held: list[AdapterName] = self._thread_state.__dict__.setdefault("held", [])
        if held:
            if held[-1] != name:
                raise ConfigError(f"this thread runs a request under {held[-1]!r}; end it before one under {name!r}")
            yield
            return
        if isinstance(name, str):
            self._check_known(name)
        self._enter(name)
        held.append(name)
        try:
            yield
        finally:
            held.pop()
            self._leave()

    def weights_changed(self) -> None:
        """Drop all digests, after a change of weights that cannot be detected, such as ``hotswap_adapter``."""
        self._identity.weights_changed()
        self._epoch += 1

    def _enter(self, name: AdapterName) -> None:
        with self._turn(lambda: not self._running or self._in_use == name):
            try:
                if not self._running and name is not AS_SET:
                    self._before = AdapterChoice(self._model)
                    choose_adapter(self._model, name)
                self._in_use = name
                self._running += 1
            except BaseException:
                self._restore()
                raise

    def _leave(self) -> None:
        with self._changed:
            self._running -= 1
            if not self._running:
                self._restore()
            self._changed.notify_all()

    def _restore(self) -> None:
        if not self._running and self._before is not None:
            self._before.restore()
            self._before = None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold exclusive access: no request runs meanwhile."""
        if self._thread_state.__dict__.get("held"):
            raise ConfigError("this thread runs a request, which needs the model unchanged; end the request first")
        with self._turn(lambda: not self._running):
            yield

    @contextmanager
    def _turn(self, is_possible: Callable[[], bool]) -> Iterator[None]:
        """Wait for one's turn, in order of arrival; nobody else has his meanwhile."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is ticket and is_possible())
                yield
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _load(self, name: str, source: str, *, replace: bool, load_kwargs: dict[str, Any]) -> None:
        watch_merges()  # before anybody else imports PEFT: if merges may have been missed, all weights are hashed again
        from peft import PeftModel
        from peft.utils.hotswap import hotswap_adapter

        if not isinstance(self._model, PeftModel):
            with warnings.catch_warnings():
                # Several adapters are intended here.
                warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
                self._model.load_adapter(source, adapter_name=name, hotswap=replace, **load_kwargs)
        elif replace:
            hotswap_adapter(self._model, source, adapter_name=name, **load_kwargs)
        else:
            self._model.load_adapter(source, adapter_name=name, **load_kwargs)
        self._model.eval()  # the new layers come in training mode

    def _check_known(self, name: str) -> None:
        if name not in self.names:
            known = f"the model has {', '.join(self.names)}" if self.names else "the model has none"
            raise ConfigError(f"there is no adapter {name!r}; {known}; load it with load_adapter()")
