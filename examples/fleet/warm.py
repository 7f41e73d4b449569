"""Prefills a corpus with a pool of Ray actors, into the tier that all replicas read.

pip install ".[ray]" "ray[data]"
python examples/fleet/warm.py MODEL CORPUS --remote-url redis://127.0.0.1:6390/0 [--actors 4] [--head FILE]

It does what `kvboost warm` does in one process. A second run prefills what is not stored yet. With RAY_ADDRESS set it
joins that cluster; every node needs KVBoost, the model and the corpus at the same paths.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from kvboost import KVBoost

# Neighbours, prefilled behind each other. What belongs together follows from the corpus alone, so that whoever runs it
# again asks for the same.
TOGETHER = 32


class Prefill:
    """One copy of the model. Ray makes one in each actor."""

    def __init__(self, model: str, engine: dict[str, Any], head: str | None = None) -> None:
        # Nobody waits for an answer here, and a server that is taken for empty is filled again.
        self._engine = KVBoost.from_pretrained(model, **{"remote_timeout_seconds": 10.0, **engine})
        self._head = head
        self._unsaved = 0

    def __call__(self, row: dict[str, Any]) -> dict[str, int]:
        """Some documents. They are written before they are counted."""
        texts = [text for path in row["paths"] if (text := Path(path).read_text(encoding="utf-8")).strip()]
        new = self._engine.add_documents(texts, head=self._head, progress=False)
        self._engine.flush()
        before, self._unsaved = self._unsaved, int(self._engine.cache_stats(ask_tiers=False)["unsaved_chunks"])
        return {"documents": len(texts), "new": new, "unsaved": max(0, self._unsaved - before)}


def rows(corpus: Path) -> list[dict[str, list[str]]]:
    """The paths of a folder's text files, so many together."""
    paths = sorted(str(path) for pattern in ("*.txt", "*.md", "*.rst") for path in corpus.resolve().rglob(pattern))
    return [{"paths": paths[begin : begin + TOGETHER]} for begin in range(0, len(paths), TOGETHER)]


def main() -> None:
    """Prefill a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("corpus", type=Path, help="its .txt, .md and .rst files")
    parser.add_argument("--remote-url", required=True, help="redis://HOST:PORT/0 or its kin")
    parser.add_argument("--actors", type=int, default=1, help="copies of the model (default 1)")
    parser.add_argument("--actor-cpus", type=float, default=1.0, help="that each reserves (default 1)")
    parser.add_argument("--actor-gpus", type=float, default=0.0, help="that each reserves (default 0)")
    parser.add_argument("--head", type=Path, metavar="FILE", help="what your prompts begin with")
    parser.add_argument("--quality", default="auto", help="that of the readers: auto (default), high or fast")
    parser.add_argument("--chunk-size", type=int, help="that of the readers, where they set one")
    parser.add_argument("--dtype", default="auto", help="that of the readers, where they set one")
    args = parser.parse_args()
    work = rows(args.corpus)
    if not work:
        parser.error(f"{args.corpus} has no text files")

    import ray
    import ray.data

    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level="error")
    else:  # only paths and counts pass through its object store
        ray.init(address="local", include_dashboard=False, object_store_memory=2**28, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False  # there is one of ours
    engine = {"remote_url": args.remote_url, "quality": args.quality, "dtype": args.dtype}
    if args.chunk_size is not None:
        engine["chunk_size"] = args.chunk_size
    head = args.head.read_text(encoding="utf-8") if args.head is not None else None
    done = ray.data.from_items(work, override_num_blocks=len(work)).map(
        Prefill,
        fn_constructor_kwargs={"model": args.model, "engine": engine, "head": head},
        compute=ray.data.ActorPoolStrategy(size=min(args.actors, len(work))),
        num_cpus=args.actor_cpus,
        num_gpus=args.actor_gpus,
    )
    total = {"documents": 0, "new": 0, "unsaved": 0}
    with tqdm(total=sum(len(row["paths"]) for row in work), unit="doc", desc="prefilling") as bar:
        for row in done.iter_rows():
            total = {name: count + int(row[name]) for name, count in total.items()}
            bar.update(int(row["documents"]))
    print(f"{total['documents']} documents are stored; {total['new']} chunks were new.")
    if total["unsaved"]:
        sys.exit(f"{total['unsaved']} chunks were not stored; look at the server, and run it again")


if __name__ == "__main__":
    main()
