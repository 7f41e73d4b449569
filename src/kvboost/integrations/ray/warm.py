"""``kvboost warm --ray``: a corpus prefilled by a pool of actors, its records written to the shared tier.

Called by :mod:`kvboost.cli.warm`. Two passes of Ray Data over the corpus: the first counts tokens and asks the shared
tier what it has, the second prefills what is missing. Invariants: which documents share a prompt follows from the
corpus alone, so a group that is run again has the same keys, finds what was written of it, and stores nothing twice,
whoever was killed in between; a group of which every document is stored is not run; the driver holds no document.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.data
from ray.data import ActorPoolStrategy
from ray.exceptions import RayError
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.approx.documents import (
    MAX_GROUP_TOKENS,
    Document,
    join_group,
    named_documents,
)
from kvboost.engine import KVBoost
from kvboost.errors import CapacityError, ConfigError, PlaceError
from kvboost.integrations.ray.config import last_line
from kvboost.integrations.ray.warm_plan import CorpusSurvey, SurveyedDocument, WarmPlan, spread
from kvboost.store.tiers.mooncake import giving_nothing
from kvboost.types import GenerationMode

_TIMED_TOKENS = 512  # prefilled by every actor, for the estimate of the time
_SURVEY_BATCH = 128  # documents: one round trip, and one wait, for all of them
_GROUPS_AT_ONCE = 4
_UNWRITTEN_BYTES = 2**26  # of groups: far less than the queue of writes holds
_OWN_TIERS = ("disk_cache_dir", "disk_cache_bytes")
_PATIENCE_S = 10.0
_ASKED_AGAIN_S = 0.2


@dataclass(frozen=True)
class WarmResult:
    """What a run did."""

    documents: int
    """Of the groups that were run."""
    new_chunks: int
    unsaved: int
    left: int
    """Of the groups that the time did not suffice for."""


@dataclass(frozen=True, kw_only=True)
class Warming:
    """A corpus and how it is prefilled."""

    model: str
    engine: Mapping[str, Any]
    """Keyword arguments of ``KVBoost.from_pretrained``."""
    paths: Sequence[Path]
    head: str | None = None
    context_documents: int = 2
    actors: int = 1
    actor_cpus: float = 1.0
    actor_gpus: float = 0.0

    def survey(self, *, progress: bool = True) -> CorpusSurvey:
        """Read and tokenise the corpus, and ask the shared tier what it has of it."""
        rows = [{"index": index, "path": str(path)} for index, path in enumerate(self.paths)]
        surveyed = self._run(_Survey, rows, batch_size=_SURVEY_BATCH)
        with tqdm(surveyed, total=len(rows), unit="doc", desc="reading", disable=not progress) as bar:
            found = sorted(bar, key=lambda row: int(row["index"]))
        if failed := next((row["failed"] for row in found if row["failed"]), None):
            raise PlaceError(failed)  # raised by an actor, it would come as Ray's trace
        usable = [row for row in found if row["tokens"] > 0]
        if not usable:
            raise ConfigError("the corpus has no document that fits the model; split long ones")
        return CorpusSurvey(
            documents=tuple(SurveyedDocument(int(r["index"]), int(r["tokens"]), bool(r["known"])) for r in usable),
            head_tokens=int(usable[0]["head_tokens"]),
            max_tokens=int(usable[0]["max_tokens"]),
            bytes_per_token=int(usable[0]["bytes_per_token"]),
            tokens_per_second=min(float(row["tokens_per_second"]) for row in usable),
            unusable=tuple(int(row["index"]) for row in found if row["tokens"] == 0),
        )

    def plan(self, survey: CorpusSurvey, *, budget_bytes: int | None = None) -> WarmPlan:
        """What is to be prefilled."""
        return survey.plan(context_documents=self.context_documents, actors=self.actors, budget_bytes=budget_bytes)

    def run(self, plan: WarmPlan, *, seconds: float | None = None, progress: bool = True) -> WarmResult:
        """Prefill what the plan names; groups that have not begun after ``seconds`` are left for another run."""
        deadline = time.time() + seconds if seconds is not None else None
        rows = [
            {"group": json.dumps([[str(self.paths[number]) for number in numbers] for numbers in group])}
            for group in plan.groups
        ]
        documents = new = left = 0
        unsaved: dict[str, tuple[int, int]] = {}  # of each actor: after so many groups, so many chunks
        with tqdm(
            total=sum(len(own) for _, own in plan.groups), unit="doc", desc="prefilling", disable=not progress
        ) as bar:
            for row in self._run(_Prefill, rows, batch_size=_GROUPS_AT_ONCE, deadline=deadline) if rows else ():
                documents += int(row["documents"]) if not row["left"] else 0
                left += int(row["documents"]) if row["left"] else 0
                new += int(row["new"])
                so_far = int(row["groups"]), int(row["unsaved"])
                unsaved[row["actor"]] = max(unsaved.get(row["actor"], so_far), so_far)
                bar.update(int(row["documents"]))
        return WarmResult(documents, new, sum(chunks for _, chunks in unsaved.values()), left)

    def _run(
        self, actor: type, rows: list[dict[str, Any]], *, batch_size: int, **more: Any
    ) -> Iterator[dict[str, Any]]:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False  # there is one of ours
        batch_size, blocks = spread(len(rows), actors=self.actors, batch_size=batch_size)
        made = {"model": self.model, "engine": dict(self.engine), "head": self.head, **more}
        results = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            actor,
            batch_size=batch_size,
            fn_constructor_kwargs=made,
            compute=ActorPoolStrategy(size=min(self.actors, blocks)),
            num_cpus=self.actor_cpus,
            num_gpus=self.actor_gpus,
        )
        try:
            yield from results.iter_rows()
        except RayError as error:
            raise ConfigError(f"an actor failed: {last_line(error)}") from error


class _Encoder:
    """A model of its own, and documents as it reads them."""

    def __init__(self, *, model: str, engine: Mapping[str, Any], head: str | None) -> None:
        # Nobody waits for an answer here, and a server that is taken for empty is filled again. What one machine has
        # on its disk, or gives to a Mooncake Store while it runs, is not stored for the others.
        shared = {name: value for name, value in engine.items() if name not in _OWN_TIERS}
        if "remote_url" in shared:
            shared["remote_url"] = giving_nothing(shared["remote_url"])
        self.engine = KVBoost.from_pretrained(model, **{"remote_timeout_seconds": _PATIENCE_S, **shared})
        if self.engine.session is None:
            raise ConfigError(f"{model} allows no reuse; nothing can be warmed")
        self.session = self.engine.session
        self.head = self.engine.encode(head) if head is not None else []
        longest = self.session.limits.longest_reused
        self.max_tokens = longest if longest is not None else 2**62
        assert self.engine.parts.layout is not None  # there is a session
        self.bytes_per_token = self.engine.parts.layout.bytes_per_token

    def document(self, path: str) -> Document | None:
        """None for one that is empty or does not fit. Raises ConfigError for one that cannot be read."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}; convert it, or leave it out") from error
        if not text.strip():
            return None
        parts = self.engine.parts
        try:
            (document,) = named_documents([text], parts.encoder, parts.chunker, ids=None, key=None)
        except CapacityError:
            return None
        return document if len(self.head) + len(document.tokens) <= self.max_tokens else None

    def known(self, documents: Sequence[Document]) -> list[bool]:
        """Which of them a shared tier has wholly. Raises PlaceError if one does not answer."""
        known, failed = self._asked(documents)
        if not all(known):
            time.sleep(_ASKED_AGAIN_S)  # a tier that was late once makes nobody compute a document again
            again, failed = self._asked(documents)
            known = [one or other for one, other in zip(known, again, strict=True)]
        if failed and not all(known):
            raise PlaceError(f"{', '.join(failed)} does not answer; warm again when it does")
        return known

    def _asked(self, documents: Sequence[Document]) -> tuple[list[bool], list[str]]:
        """Which of them are stored, and the tiers that failed meanwhile."""
        before = {name: tier.work.errors for name, tier in self.engine.tier_states().items()}
        known = self.session.prefiller.knows([(document.tokens, document.cuts) for document in documents])
        after = self.engine.tier_states().items()
        return known, [name for name, tier in after if not tier.available or tier.work.errors > before.get(name, 0)]


class _Survey(_Encoder):
    """Counts the tokens of documents, and asks whether they are stored."""

    def __init__(self, **made: Any) -> None:
        super().__init__(**made)
        ids = [1 + number % 100 for number in range(min(_TIMED_TOKENS, self.max_tokens))]
        for _ in range(2):  # the first one is slower
            began = time.perf_counter()
            self.engine.prefill(ids, mode=GenerationMode.BASELINE)
            self.per_second = len(ids) / (time.perf_counter() - began)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Of a batch of paths."""
        found: list[Document | None] = [None] * len(batch["path"])
        known: Iterator[bool] = iter(())
        failed = ""
        try:
            found = [self.document(path) for path in batch["path"]]
            known = iter(self.known([document for document in found if document is not None]))
        except (ConfigError, PlaceError) as error:
            failed = str(error)
        rows = len(found)
        return {
            "index": batch["index"],
            "tokens": [len(document.tokens) if document is not None else 0 for document in found],
            "known": [document is not None and next(known, False) for document in found],
            "bytes_per_token": [self.bytes_per_token] * rows,
            "head_tokens": [len(self.head)] * rows,
            "max_tokens": [min(MAX_GROUP_TOKENS, self.max_tokens)] * rows,
            "tokens_per_second": [self.per_second] * rows,
            "failed": [failed] * rows,
        }


class _Prefill(_Encoder):
    """Prefills groups, and writes their records before it says so."""

    def __init__(self, *, deadline: float | None, **made: Any) -> None:
        super().__init__(**made)
        self._deadline = deadline
        self._name, self._groups = uuid.uuid4().hex, 0
        self._unwritten_bytes = 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Some groups: one is written while the next is computed, where they are small."""
        groups = [json.loads(group) for group in batch["group"]]
        chunks = [self._warm(context, new) for context, new in groups]
        self._flush()
        self._groups += len(groups)
        unsaved = int(self.engine.cache_stats(ask_tiers=False)["unsaved_chunks"])  # of all its groups so far
        return {
            "documents": [len(new) for _, new in groups],
            "new": [count or 0 for count in chunks],
            "left": [count is None for count in chunks],
            "actor": [self._name] * len(groups),
            "groups": [self._groups] * len(groups),
            "unsaved": [unsaved] * len(groups),
        }

    def _warm(self, context: Sequence[str], new: Sequence[str]) -> int | None:
        """The number of new chunks; None if the time is up."""
        if self._deadline is not None and time.time() >= self._deadline:
            return None
        documents = [document for path in (*context, *new) if (document := self.document(path)) is not None]
        tokens, boundaries = join_group(documents, head=self.head)
        chunks = self.engine.warm(tokens, boundaries=boundaries)
        self._unwritten_bytes += len(tokens) * self.bytes_per_token
        if self._unwritten_bytes > _UNWRITTEN_BYTES:
            self._flush()
        return chunks

    def _flush(self) -> None:
        self.engine.flush()
        self._unwritten_bytes = 0
