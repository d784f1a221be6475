"""The one door to the ``tokenizers`` package: the reference that a converted vocabulary is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from edgeinfer.errors import ConversionFailed, ModelDamaged


class HFTokenizer:
    """A tokenizer.json, with added tokens that only the files beside it name.

    added: (id, text, special) of such tokens. Raises `ModelDamaged` for an unreadable file, `ConversionFailed` when the ids cannot be had.
    """

    def __init__(self, path: Path, added: Iterable[tuple[int, str, bool]] = ()):
        from tokenizers import AddedToken, Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:                       # the package raises plain Exception for whatever it dislikes
            raise ModelDamaged(f"{path} cannot be read by the tokenizers package: {error}.") from error
        # A reference must see the whole text and nothing else.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for token, text, special in sorted(added):
            self._tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
            given = self._tokenizer.token_to_id(text)
            if given != token:
                raise ConversionFailed(f"{text!r} should have the id {token}, and after {path} it gets {given}: a token between them is missing.")

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids; markers inside the text become the tokens they name."""
        return self._tokenizer.encode(text, add_special_tokens=add_special).ids
