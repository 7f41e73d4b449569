"""The process in which atheris looks for inputs that reach new lines of the record decoder: ``RUNS SEED FOLDER``.

An input's first byte says which of the honest records it is read as, and whether its seal and checksum are made right,
without which nothing would ever come behind them. Prints the counts; what the decoder must not do ends the process.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import Counter
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvboost"]):
    from benchmarks.store import record_fuzz
    from kvboost.store.record.header import PAGE, seal_of

_COUNTS: Counter[str] = Counter()


def one_input(data: bytes) -> None:
    """Feed one input."""
    first, changed = data[0] if data else 0, bytearray(data[1:])
    record = record_fuzz.OWN[first % 16]
    if first & 16 and len(changed) >= PAGE:
        changed[224:228] = zlib.crc32(changed[PAGE:]).to_bytes(4, "little")
        changed[24:56] = seal_of(changed[:PAGE], record.mac_key)
    outcome = record_fuzz.feed(record, bytes(changed))
    # atheris sees what the decoder compares, and so finds the right seal by itself, too.
    sealed = len(changed) >= PAGE and changed[24:56] == seal_of(changed[:PAGE], record.mac_key)
    assert outcome == "refused" or (outcome == "accepted" and sealed), f"{outcome}: {bytes(changed)[:400].hex()}"
    _COUNTS[outcome] += 1
    if _COUNTS.total() == _RUNS:  # the process ends without a return from here
        print(json.dumps({"inputs": _RUNS, **_COUNTS}), flush=True)


if __name__ == "__main__":
    _RUNS, folder = int(sys.argv[1]), Path(sys.argv[3])
    for number, record in enumerate(record_fuzz.OWN):
        (folder / str(number)).write_bytes(bytes([number]) + record.data)
    options = [f"-runs={_RUNS}", f"-seed={sys.argv[2]}", "-max_len=8192", f"-artifact_prefix={folder}/", str(folder)]
    atheris.Setup([sys.argv[0], *options], one_input)
    atheris.Fuzz()
