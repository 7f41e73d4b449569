"""GET /: one page that shows what the cache does.

It carries no numbers: the browser fetches them with the admin's key.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.responses import Response

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _text() -> bytes:
    return files("kvboost.serve.ui").joinpath("page.html").read_bytes()


async def page() -> Response:
    """The page; nothing in it comes from anywhere else."""
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(_text(), media_type="text/html; charset=utf-8", headers=headers)
