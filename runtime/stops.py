"""Stop strings in a stream of text.

One rule decides: the answer ends before the stop string that *starts* first in the whole text, however the text was divided on its way. So text is
held back exactly as long as it may still turn out to be the start of a stop string.
"""

from __future__ import annotations


class StopMatcher:
    """Watches one answer for any of ``stops`` (non-empty strings).

    ``stopped`` says whether a stop string was found; after that nothing more is emitted.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._stops = stops
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is now certain to belong to the answer, and whether the answer has ended."""
        if self.stopped:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        found, open_start = self._found(text), self._open_start(text)
        # "bc" is complete in "abc", but with "abcd" among the stops an earlier one may still complete: both positions stay held.
        if found is not None and found < open_start:
            self._held, self.stopped = "", True
            return text[:found], True
        self._held = text[open_start:]
        return text[:open_start], False

    def flush(self) -> str:
        """The rest of an answer that ended for another reason. Sets ``stopped`` when the rest itself holds a complete stop string."""
        rest, self._held = self._held, ""
        found = self._found(rest)
        if found is not None:
            self.stopped = True
        return rest[:found]

    def _found(self, text: str) -> int | None:
        """Where the first complete stop string starts."""
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(starts, default=None)

    def _open_start(self, text: str) -> int:
        """Where the longest tail starts that is a proper prefix of a stop string; len(text) when there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                tail = text[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
