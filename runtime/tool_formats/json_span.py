"""Where a JSON value ends, found while it is still being written."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[\s,}\]]")


class JsonSpan:
    """Follows brackets and strings of one value, without judging what is between them. The value begins with the first character fed.

    depth: 1 to start inside an object and find its end.
    """

    def __init__(self, depth: int = 0):
        self._depth = depth
        self._begun = depth > 0
        self._scalar = self._string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """How many characters of ``text`` still belong to the value, when it ends in it or right before it; None while it goes on."""
        at = 0
        if text and not self._begun:
            self._begun = True
            self._scalar = text[0] not in '{["'
        if self._scalar:
            end = _AFTER_SCALAR.search(text)
            return end.start() if end else None
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._string else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                case '"':
                    self._string = not self._string
                    if not self._string and not self._depth:
                        return at
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None
