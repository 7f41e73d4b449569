"""An extension of griffe for the site: roles in docstrings, such as :class:`X`, become plain code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|mod|func|attr|data):`~?([^`]+)`")


def plain(text: str) -> str:
    """``text`` without roles."""
    return _ROLE.sub(r"`\1`", text)


class PlainRoles(griffe.Extension):
    """Called by griffe for every object that it loads."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change its docstring."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)
