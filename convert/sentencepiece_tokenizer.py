"""The one door to the ``sentencepiece`` package: the reference for folders that have a tokenizer.model and no tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from edgeinfer.errors import ModelDamaged


class SPMTokenizer:
    """A tokenizer.model and its markers: text is cut at markers first (the longest one that fits), and each stretch between is encoded by itself.

    markers: text -> id of control and added tokens. lstrip, rstrip: those that swallow the whitespace before or after them.
    """

    def __init__(
        self, path: Path, markers: Mapping[str, int], *, bos_id: int | None = None, lstrip: Collection[str] = (), rstrip: Collection[str] = ()
    ):
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromFile(str(path))
        except (RuntimeError, OSError) as error:
            raise ModelDamaged(f"{path} cannot be read by the sentencepiece package: {error}.") from error
        self._markers = dict(markers)
        self._bos = [] if bos_id is None else [bos_id]
        longest_first = sorted(self._markers, key=len, reverse=True)
        patterns = [(r"\s*" if text in lstrip else "") + re.escape(text) + (r"\s*" if text in rstrip else "") for text in longest_first]
        self._cut = re.compile("|".join(patterns)) if patterns else None

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids; markers inside the text become the tokens they name."""
        ids = list(self._bos) if add_special else []
        at = 0
        for found in self._cut.finditer(text) if self._cut else ():
            ids += self._stretch(text[at : found.start()])
            ids.append(self._markers[found[0] if found[0] in self._markers else found[0].strip()])
            at = found.end()
        return ids + self._stretch(text[at:])

    def _stretch(self, text: str) -> list[int]:
        return self._processor.EncodeAsIds(text) if text else []
