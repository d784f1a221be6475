"""The one door to the ``sentencepiece`` package: the reference for folders that have a tokenizer.model and no tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from edgeinfer.errors import ModelDamaged


class SPMTokenizer:
    """A tokenizer.model and its markers: text is cut at markers first (the longest one that fits), and each stretch between is encoded by itself.

    markers: text -> id of control and added tokens.
    """

    def __init__(self, path: Path, markers: Mapping[str, int], *, bos_id: int | None = None):
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromFile(str(path))
        except (RuntimeError, OSError) as error:
            raise ModelDamaged(f"{path} cannot be read by the sentencepiece package: {error}.") from error
        self._markers = dict(markers)
        self._bos = [] if bos_id is None else [bos_id]
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids; markers inside the text become the tokens they name."""
        ids = list(self._bos) if add_special else []
        for stretch in self._cut.split(text) if self._cut else [text]:
            if stretch in self._markers:
                ids.append(self._markers[stretch])
            elif stretch:
                ids += self._processor.EncodeAsIds(stretch)
        return ids
