"""What lies in a Redis and how much it takes, kept in that Redis by small scripts; its own eviction may break it.

Used by the Redis tier; all processes with the same prefix share one ledger. A chunk is entered before it is written
and counts from then on, so the sum of all sizes never passes the limit, which lies there too. Where what lies is said
in :mod:`kvboost.store.tiers.redis.scripts`.

Values lie beside the ledger, or elsewhere (:mod:`kvboost.store.tiers.redis.elsewhere`): on the nodes of a cluster, or
in a Mooncake Store. Then a value that the ledger drops is removed right behind the script, by whoever ran it or, if
that one died, by another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.config import DEFAULT_PLACE_BYTES
from kvboost.store.tiers.redis import scripts
from kvboost.store.tiers.redis.elsewhere import Elsewhere
from kvboost.store.tiers.redis.resp import Link, ProtocolError, Reply, ServerError
from kvboost.types import BlockInfo, PutOutcome

_LEASE_MS = 30_000  # a writer's; it is far slower than any deadline lets it be
_PIECE_MS = 15_000  # what a killed writer leaves is gone before its lease
_AT_ONCE = 64  # chunks that one script evicts: others must get their turn
_MAX_BY_CONTENT = 32  # remembered of one content
_INFO = struct.Struct("<?QQI?32s")

Page = tuple[bytes, list[bytes]]
"""A cursor, and what was found up to there."""


@dataclass(frozen=True, slots=True)
class Writing:
    """One attempt to write a chunk."""

    key: bytes
    seal: bytes
    """In the names of its pieces: those of another writing have others."""
    writer: bytes
    """Tells this attempt from all others."""
    pieces: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What came of asking for capacity."""

    outcome: PutOutcome | None
    """None: it is reserved, and the chunk must be written now. Or not yet, see ``is_partial``."""
    is_partial: bool
    """As many were evicted as one script may, and more must go: ask again."""
    evicted: int
    must_sweep: bool
    """There was no ledger: what lies under the prefix, if anything, is not counted. Or whoever should have removed that
    did not come to its end."""
    was_broken: bool
    """The server had dropped a part of the ledger; the rest is dropped too."""
    capacity: int
    """The limit of all who use the ledger."""


class Ledger:
    """The ledger as the tier of one space uses it. It has no state: every call takes the link to be used.

    Every method may raise OSError, ProtocolError or ServerError.
    """

    def __init__(self, prefix: str, *, tenant: bytes, space: bytes, elsewhere: Elsewhere | None = None) -> None:
        self.prefix = prefix.encode()
        self.elsewhere = elsewhere
        self._tenant = tenant.hex().encode()
        self._space = self._tenant + b":" + space.hex().encode()
        self.space = self._space
        """How this space is named in the ledger."""

    def id(self, key: bytes) -> bytes:
        """How a chunk of this space is named in the ledger."""
        return self._space + b":" + key.hex().encode()

    def value(self, key: bytes) -> bytes:
        """Where a chunk's record, or its first piece, lies."""
        if self.elsewhere is not None:  # the braces: in a cluster all pieces of a chunk lie in one slot
            return self.prefix.strip(b"{}") + b":{" + self.id(key) + b"}"
        return self.prefix + b":" + self.id(key)

    def values_of(self, owner: bytes) -> bytes:
        """How the names of all values elsewhere begin that are of a space, of a tenant or of ``b"*"``."""
        return self.prefix.strip(b"{}") + b":{" + (b"" if owner == b"*" else owner + b":")

    def piece(self, key: bytes, seal: bytes, number: int) -> bytes:
        """Where another piece of its record lies; the first one too, until the chunk is finished."""
        return b"%s:%s:%d" % (self.value(key), seal, number)

    def has(self, link: Link, key: bytes) -> bool:
        """Whether a chunk is entered and all of it is there."""
        if self._run(link, scripts.HAS, self.id(key)) != 1:
            return False
        if self.elsewhere is None:
            return True
        self.delete_missing(link, [key])
        return self._run(link, scripts.HAS, self.id(key)) == 1

    def reserve(
        self,
        link: Link,
        writing: Writing,
        info: BlockInfo,
        *,
        size: int,
        wanted: int | None,
        quota: int | None,
    ) -> Reservation:
        """Enter a chunk that is about to be written, and evict others for it: the least recently used leaves.

        ``wanted`` is the limit of a ledger that has none yet; None takes the default, or what lies there.
        """
        parent = b"" if info.parent_key is None else self.id(info.parent_key)
        limits = (size, writing.pieces, wanted, quota, _LEASE_MS, _AT_ONCE, DEFAULT_PLACE_BYTES)
        numbers = (b"" if number is None else b"%d" % number for number in limits)
        names = (self.id(info.key), parent, info.content_key.hex().encode(), writing.seal, writing.writer)
        reply = self._run(link, scripts.RESERVE, *names, _packed(info), *numbers)
        if not isinstance(reply, list) or len(reply) != 4:
            raise ProtocolError("an answer that is none of the ledger's")
        outcome, evicted, lost, capacity = reply
        if not isinstance(outcome, bytes) or not isinstance(evicted, int) or not isinstance(capacity, int):
            raise ProtocolError("an answer that is none of the ledger's")
        outcomes = {b"present": PutOutcome.PRESENT, b"refused": PutOutcome.REFUSED}
        return Reservation(
            outcome=outcomes.get(outcome),
            is_partial=outcome == b"again",
            evicted=evicted,
            must_sweep=lost != 0,
            was_broken=lost == 2,
            capacity=capacity,
        )

    def capacity(self, link: Link) -> int | None:
        """The limit of all who use the ledger; None if there is none yet."""
        (reply,) = link.call([(b"HGET", self.prefix + b":ledger:place", b"capacity")])
        if isinstance(reply, ServerError):
            raise reply
        return int(reply) if isinstance(reply, bytes) and reply.isdigit() else None

    def set_capacity(self, link: Link, capacity: int) -> None:
        """Set the limit of all who use the ledger."""
        (reply,) = link.call([(b"HSET", self.prefix + b":ledger:place", b"capacity", b"%d" % capacity)])
        if isinstance(reply, ServerError):
            raise reply

    def trim(self, link: Link) -> tuple[bool, int]:
        """Evict some chunks if there are more than the limit allows; whether more must go, and how many went."""
        reply = self._run(link, scripts.TRIM, b"%d" % _AT_ONCE)
        if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], int):
            raise ProtocolError("an answer that is none of the ledger's")
        return reply[0] == b"again", reply[1]

    def write(
        self,
        link: Link,
        writing: Writing,
        pieces: Sequence[tuple[memoryview, ...]],
        *,
        ttl_ms: int,
    ) -> bool:
        """Write the pieces and then, in the same round trip, show them as one chunk. False if its entry is gone."""
        numbers = (b"%d" % number for number in (writing.pieces, ttl_ms, _MAX_BY_CONTENT))
        finish = (self.id(writing.key), writing.writer, writing.seal, *numbers)
        if self.elsewhere is not None:
            names = [self.value(writing.key)]
            names += [self.piece(writing.key, writing.seal, number) for number in range(1, len(pieces))]
            # With a time limit at first: what comes there after it was given up is in nobody's ledger.
            if self.elsewhere.put(names, pieces, until_kept_ms=_PIECE_MS):
                if self._run(link, scripts.FINISH, *finish) != 1:
                    return False
                if self.elsewhere.keep(names, ttl_ms=ttl_ms):
                    return True
            self.remove(link, [self.id(writing.key)])
            return False
        commands = [
            (b"SET", self.piece(writing.key, writing.seal, number), piece, b"PX", b"%d" % _PIECE_MS)
            for number, piece in enumerate(pieces)
        ]
        *written, finished = link.call([*commands, self._command(scripts.FINISH, *finish)])
        for reply in (finished, *written):
            if isinstance(reply, ServerError):
                raise reply
        return finished == 1

    def touch(self, link: Link, keys: Sequence[bytes]) -> None:
        """Note that chunks were used, the most recent last."""
        self._run(link, scripts.TOUCH, *map(self.id, keys))

    def delete_missing(self, link: Link, keys: Sequence[bytes]) -> None:
        """Delete the entries of chunks that were not found, if not all of their pieces are there."""
        ids = [self.id(key) for key in keys]
        if self.elsewhere is None:
            self._run(link, scripts.DELETE_MISSING, *ids)
            return
        named = self._run(link, scripts.NAMES, *ids)
        if not isinstance(named, list) or len(named) != len(ids):
            raise ProtocolError("an answer that is none of the ledger's")
        names = [(id, name) for id, some in zip(ids, named, strict=True) for name in _names(some)]
        there = self.elsewhere.exist([name for _, name in names])
        gone = {id for (id, _), is_there in zip(names, there, strict=True) if is_there is False}
        if gone:
            self.remove(link, list(gone))

    def remove(self, link: Link, ids: Sequence[bytes]) -> None:
        """Remove chunks and their entries."""
        self._run(link, scripts.REMOVE, *ids)

    def variants(self, link: Link, contents: Sequence[bytes], limit: int) -> list[list[BlockInfo]]:
        """For each content, the most recently used chunks that hold it, newest last."""
        hexes = (content.hex().encode() for content in contents)
        reply = self._run(link, scripts.VARIANTS, self._space, b"%d" % limit, *hexes)
        if not isinstance(reply, list) or len(reply) != len(contents):
            raise ProtocolError("an answer that is none of the ledger's")
        return [_infos(found, content) for found, content in zip(reply, contents, strict=True)]

    def totals(self, link: Link) -> tuple[int, int, int]:
        """Chunks and bytes of this space, and the bytes of all."""
        fields = (b"chunks:" + self._space, b"bytes:" + self._space, b"bytes")
        reply = self._run(link, scripts.TOTALS, b"%d" % _AT_ONCE, *fields)
        numbers = [number for number in reply if isinstance(number, int)] if isinstance(reply, list) else []
        if len(numbers) != 3:
            raise ProtocolError("an answer that is none of the ledger's")
        return numbers[0], numbers[1], numbers[2]

    def spaces(self, link: Link, *, owner: bytes, cursor: bytes) -> Page:
        """Some spaces of a tenant or of ``b"*"``, or the one given; all of them after the cursor has come back."""
        pattern = b"chunks:" + owner + (b"" if owner == b"*" or b":" in owner else b":*")
        command = (b"HSCAN", self.prefix + b":ledger", cursor, b"MATCH", pattern, b"COUNT", b"1000")
        cursor, found = _page(link.call([command])[0])
        return cursor, [field.removeprefix(b"chunks:") for field in found[::2]]

    def purge_some(self, link: Link, *, space: bytes, limit: int) -> int:
        """Remove some chunks of a space; how many, -1 if the list of the space is not whole."""
        reply = self._run(link, scripts.PURGE_SOME, space, b"%d" % limit)
        return reply if isinstance(reply, int) else -1

    def is_whole(self, link: Link) -> bool:
        """Whether the ledger counts everything that lies under the prefix."""
        return self._run(link, scripts.IS_WHOLE) == 1

    def lost_at(self, link: Link) -> bytes:
        """When the ledger was begun anew, if what lay there is not swept away yet; else empty."""
        (reply,) = link.call([(b"HGET", self.prefix + b":ledger:place", b"lost")])
        if isinstance(reply, ServerError):
            raise reply
        return reply if isinstance(reply, bytes) else b""

    def swept(self, link: Link, *, lost_at: bytes) -> None:
        """Note that nothing is left of what lay there at that time."""
        self._run(link, scripts.SWEPT, lost_at)

    def ids(self, link: Link, *, owner: bytes, cursor: bytes) -> Page:
        """Some ids of a space, of a tenant or of ``b"*"``; all of them after the cursor has come back to ``b"0"``."""
        command = (b"HSCAN", self.prefix + b":ledger:entries", cursor, b"MATCH", owner + b":*", b"COUNT", b"1000")
        cursor, found = _page(link.call([command])[0])
        return cursor, found[::2]

    def described(self, link: Link, ids: Sequence[bytes]) -> list[tuple[int, int] | None]:
        """For chunks of any space: the bytes each takes and the second it was last used; None if it is not written."""
        reply = self._run(link, scripts.DESCRIBE, *ids)
        if not isinstance(reply, list) or len(reply) != len(ids):
            raise ProtocolError("an answer that is none of the ledger's")
        return [_pair(found) for found in reply]

    def sweep(self, link: Link, *, cursor: bytes) -> bytes:
        """Remove some of what lies under the prefix and is not counted; the next cursor, ``b"0"`` at the end."""
        below = self.prefix + b":"
        scan = (b"SCAN", cursor, b"MATCH", _literal(below) + b"*", b"COUNT", b"1000")
        cursor, found = _page(link.call([scan])[0])
        ours = (below + b"ledger", below + b"ledger:")
        names = [key[len(below) :] for key in found if key != ours[0] and not key.startswith(ours[1])]
        names += [key[len(below) :] for key in found if key.startswith(below + b"ledger:of:")]
        if names:
            self._run(link, scripts.ORPHANS, *names)
        return cursor

    def strays(self, link: Link, *, names: Sequence[bytes]) -> bool:
        """Remove those of these values, which lie elsewhere, that are not counted, or have that done. True."""
        self._run(link, scripts.STRAYS, *names)
        return True

    def _command(self, script: str, *arguments: bytes) -> tuple[bytes, ...]:
        # With its text: Redis finds it compiled by its digest, and may forget it without our knowing.
        text = scripts.BESIDE if self.elsewhere is None else scripts.APART
        return (b"EVAL", (text % (scripts.COMMON + script)).encode(), b"1", self.prefix, *arguments)

    def _run(self, link: Link, script: str, *arguments: bytes) -> Reply:
        reply = link.call([self._command(script, *arguments)])[0]
        if isinstance(reply, ServerError):
            raise reply
        if self.elsewhere is None:
            return reply
        if not isinstance(reply, list) or len(reply) != 2:
            raise ProtocolError("an answer that is none of the ledger's")
        garbage = _names(reply[1])
        gone = self.elsewhere.unlink(garbage) if garbage else []
        left = set(garbage).difference(gone)
        if gone:
            link.call([(b"ZREM", self.prefix + b":ledger:garbage", *gone)])
        if left:  # the next one may try
            link.call([self._command(scripts.RELEASE, *left)])
        return reply[0]


def _names(reply: Reply) -> list[bytes]:
    return [name for name in reply if isinstance(name, bytes)] if isinstance(reply, list) else []


def _page(reply: Reply) -> Page:
    if isinstance(reply, ServerError):
        raise reply
    if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[0], bytes) and isinstance(reply[1], list):
        return reply[0], [name for name in reply[1] if isinstance(name, bytes)]
    raise ProtocolError("no page of a scan")


def _pair(found: Reply) -> tuple[int, int] | None:
    if isinstance(found, list) and len(found) == 2 and isinstance(found[0], int) and isinstance(found[1], int):
        return found[0], found[1]
    return None


def _literal(pattern: bytes) -> bytes:
    """So that SCAN takes it as it stands."""
    return b"".join(b"\\" + bytes((letter,)) if letter in b"*?[]\\^-" else bytes((letter,)) for letter in pattern)


def _packed(info: BlockInfo) -> bytes:
    parent = info.parent_key
    fixed = (info.bitwise, info.nbytes, info.start, info.approx_depth, parent is not None, parent or b"")
    return _INFO.pack(*fixed) + info.context


def _infos(found: Reply, content: bytes) -> list[BlockInfo]:
    """What can be read of the answer for one content: it is only a hint."""
    infos = []
    for pair in found if isinstance(found, list) else []:
        if not isinstance(pair, list) or len(pair) != 2:
            continue
        name, packed = pair
        if not isinstance(name, bytes) or not isinstance(packed, bytes) or len(packed) < _INFO.size:
            continue
        try:
            key = bytes.fromhex(name.rpartition(b":")[2].decode("ascii"))
        except ValueError:
            continue
        bitwise, nbytes, start, approx_depth, has_parent, parent = _INFO.unpack_from(packed)
        infos.append(
            BlockInfo(
                key=key,
                parent_key=parent if has_parent else None,
                content_key=content,
                nbytes=nbytes,
                bitwise=bitwise,
                start=start,
                context=packed[_INFO.size :],
                approx_depth=approx_depth,
            )
        )
    return infos
