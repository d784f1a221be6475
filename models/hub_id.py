"""The written form of a model on the hub: user/repo[:QUANT][@revision]."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(:(?P<quantization>[\w-]+))?(@(?P<revision>[\w][\w./-]*))?", re.ASCII)


@dataclass(frozen=True)
class HubId:
    """``quantization`` chooses among the GGUF files of a repository; ``revision`` is a branch, tag or commit."""

    repo: str
    quantization: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """The parts, or None when the text has another form."""
        match = _FORM.fullmatch(text)
        if match is None or ".." in text or "--" in match["repo"]:
            return None
        return cls(**match.groupdict())
