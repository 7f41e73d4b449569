"""``kvboost cache``: manage the chunk records of a directory or a Redis server.

Called by :mod:`kvboost.cli.main`. It needs no model: records say what they are. Invariants: only ``purge``
and ``verify --remove`` change anything; with ``--json`` the output is JSON and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvboost.cli import cache_records as records
from kvboost.cli.output import age, note, progress, size
from kvboost.errors import ConfigError
from kvboost.types import tenant_digest

if TYPE_CHECKING:
    from kvboost.store.admin.base import Entry, Finding

_DAMAGE = 1
_SAMPLES = 3  # records of a space whose headers are tried

Place = Annotated[str, typer.Argument(metavar="PLACE", help="A cache directory, or redis://HOST:PORT.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Tenant = Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant's.")]
Space = Annotated[
    str | None, typer.Option("--space", metavar="HEX", help="Only of this space, by its first digits (see stat).")
]
Keys = Annotated[
    list[Path] | None,
    typer.Option("--key-file", metavar="FILE", help="An engine's record_key_file; may be given several times."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

app = typer.Typer(
    help="Manage stored chunks: count, verify and remove. Needs no model.",
    rich_markup_mode="rich",
    no_args_is_help=False,
)


@app.command("stat", epilog="Example:  kvboost cache stat redis://127.0.0.1:6379/0 --json")
def statistics(place: Place, *, as_json: AsJson = False) -> None:
    """Show how much is stored, by space: a model with its settings, a tenant and a codec."""
    counted: dict[bytes, dict[str, Any]] = {}
    samples: dict[bytes, list[Entry]] = {}
    with records.open_location(place) as catalogue:
        for entry in progress("listing", catalogue.entries()):
            row = counted.setdefault(
                entry.space,
                {"space": entry.space.hex(), "tenant": records.to_hex(entry.tenant), "records": 0, "bytes": 0}
                | {"used_first": entry.used_at, "used_last": entry.used_at},
            )
            row["records"] += 1
            row["bytes"] += entry.size
            if entry.used_at is not None:
                row["used_first"] = min(row["used_first"], entry.used_at)
                row["used_last"] = max(row["used_last"], entry.used_at)
            if row["records"] <= _SAMPLES:
                samples.setdefault(entry.space, []).append(entry)
        for entry, head in catalogue.heads(entry for some in samples.values() for entry in some):
            counted[entry.space] |= records.header_fields(records.parse_header(entry, head))
        name = catalogue.place
    rows = sorted(counted.values(), key=lambda row: -row["bytes"])
    totals = {"records": sum(row["records"] for row in rows), "bytes": sum(row["bytes"] for row in rows)}
    if as_json:
        for row in rows:
            row |= {"used_first": records.iso_time(row["used_first"]), "used_last": records.iso_time(row["used_last"])}
        print(json.dumps({"place": name, **totals, "spaces": rows}))
        return
    table = Table("space", "model", "tenant", "codec", "tensors", box=None, pad_edge=False)
    for title in ("records", "size", "last used"):
        table.add_column(title, justify="right")
    for row in rows:
        model = row.get("model")
        table.add_row(
            row["space"][:8],
            model[:12] if model else "?",
            records.tenant_name(row["tenant"]),
            row.get("codec", "?"),
            row.get("tensors", "?"),
            str(row["records"]),
            size(row["bytes"]),
            f"{age(row['used_last'])} to {age(row['used_first'])} ago",
        )
    records.console().print(table)
    print(f"{totals['records']} records, {size(totals['bytes'])} in {name}")


@app.command("purge", epilog="Example:  kvboost cache purge ~/.cache/kvboost/kv --tenant acme --yes")
def purge(
    place: Place,
    *,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Whose; an engine's tenant setting.")
    ] = None,
    space: Space = None,
    everything: Annotated[bool, typer.Option("--all", help="Of every tenant, also of those that are no more.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove everything of a tenant or of a space, or all.

    Engines that run keep what they have in memory, and write it again: clear those first (POST /v1/cache/clear).
    """
    if [everything, tenant is not None, space is not None].count(True) != 1:
        raise ConfigError("say what to remove: --tenant NAME, --space HEX, or --all")
    with records.open_location(place) as catalogue:
        # Before the question: digits that name no space, or several, remove nothing.
        entries = list(records.select_records(catalogue, None, space)) if space is not None else []
        whose = f"of tenant {tenant!r} " if tenant is not None else f"of space {space} " if space is not None else ""
        records.confirm(f"Remove everything {whose}from {catalogue.place}?", yes)
        if space is not None:
            removed = catalogue.remove(entries)
        else:
            removed = catalogue.purge(tenant_digest(tenant) if tenant is not None else None)
    if tenant is not None and not removed:
        note(f"nothing of a tenant {tenant!r} is here; tenants of a server have the names that GET /v1/cache lists")
    print(json.dumps({"removed": removed}) if as_json else f"{removed} records removed")


@app.command("verify", epilog="Example:  kvboost cache verify redis://127.0.0.1:6379/0 --key-file kv.key")
def verify(
    place: Place,
    *,
    tenant: Tenant = None,
    space: Space = None,
    key_file: Keys = None,
    remove_damaged: Annotated[bool, typer.Option("--remove", help="Remove what is damaged.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every record and check it. Exit code 1: there is damage."""
    from kvboost.store.admin.base import Verdict

    counts: Counter[str] = Counter({verdict.value: 0 for verdict in Verdict})
    damaged: list[tuple[Entry, Finding]] = []
    with records.open_location(place) as catalogue:
        keys = records.read_key_files(key_file)
        # Listed twice rather than kept in memory: there may be tens of millions.
        total = sum(1 for _ in progress("counting", records.select_records(catalogue, tenant, space)))
        found = catalogue.verified(records.select_records(catalogue, tenant, space), keys=keys)
        for entry, finding in progress("checking", found, total=total):
            counts[finding.verdict.value] += 1
            if finding.verdict is Verdict.DAMAGED:
                damaged.append((entry, finding))
        removed = catalogue.remove([entry for entry, _ in damaged]) if remove_damaged else 0
    if as_json:
        reports = [{"key": e.key.hex(), "space": e.space.hex(), "reason": finding.reason} for e, finding in damaged]
        found_by_name = {name.replace(" ", "_"): count for name, count in counts.items()}
        print(json.dumps({**found_by_name, "removed": removed, "damage": reports}))
    else:
        for entry, finding in damaged:
            print(f"{entry.key.hex()[:12]} in {entry.space.hex()[:8]}: {finding.reason}")
        said = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no records"
        print(said + (f"; {removed} removed" if remove_damaged else ""))
        if counts[Verdict.LOCKED.value]:
            note("give the keys of the locked ones with --key-file to check them")
    if damaged:
        raise typer.Exit(_DAMAGE)
