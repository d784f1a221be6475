"""llama.cpp's vocabulary as the runtime's `Vocab`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from edgeinfer.models.gguf_header import GGUFHeader
from edgeinfer.models.gguf_values import Strings
from edgeinfer.models.native import NativeModel, llama
from edgeinfer.models.tokenizer_text import NORMALIZER_KEY, SPACE_PREFIX_KEY, prepare_text

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4              # values of tokenizer.ggml.token_type
_ATTR_CONTROL = 8                                        # llama.cpp's own verdict, LLAMA_TOKEN_ATTR_CONTROL
STOP_IDS_KEY = "edgeinfer.stop_token_ids"                # written by our converter: the stop ids of every file of the source


class LlamaVocab:
    """Reads go to llama.cpp's vocabulary, which is immutable.

    Kinds of tokens: the header says which tokens are special; llama.cpp overrules it for well-known turn markers that a file stores as ordinary
    tokens. Asking it about every token costs 35 ms at 49k, so only the special ones and those written like a marker are asked about.
    """

    def __init__(self, model: NativeModel, header: GGUFHeader):
        lib = llama()
        self._model = model
        vocab = model.vocab
        self.bos_id = _named(header, "bos", lib.llama_vocab_bos(vocab))
        self.eos_id = _named(header, "eos", lib.llama_vocab_eos(vocab))
        self._normalizer = header.metadata.get(NORMALIZER_KEY, "")
        self._space_prefix = header.metadata.get(SPACE_PREFIX_KEY, "")
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(vocab)) and self.bos_id is not None
        template = lib.llama_model_chat_template(model.handle, None)
        self.chat_template = template.decode("utf-8", "replace") if template else None
        kinds = np.asarray(header.metadata.get("tokenizer.ggml.token_type", ()), np.int32)
        special = {int(token) for token in np.flatnonzero((kinds >= _UNKNOWN) & (kinds <= _USER_DEFINED))}
        texts = header.metadata.get("tokenizer.ggml.tokens")
        if isinstance(texts, Strings):
            special |= {token for token, text in enumerate(texts.raw()) if text[:1] == b"<" and text[-1:] == b">" and len(text) > 2}
        attributes = {token: lib.llama_vocab_get_attr(vocab, token) for token in sorted(special)}
        # Whatever parse_special turns from text into its token must count as a marker; <unk> is such a token too.
        control = [token for token, attribute in attributes.items() if attribute & _ATTR_CONTROL or (token < len(kinds) and kinds[token] == _UNKNOWN)]
        user = [token for token in special - set(control) if token < len(kinds) and kinds[token] == _USER_DEFINED]
        stops = {int(token) for token in header.metadata.get(STOP_IDS_KEY, ())}
        # llama.cpp knows eos, eot, eom and the usual spellings; our converter adds what the source's files name beyond them.
        self.end_ids = frozenset(
            stops | {token for token in attributes if lib.llama_vocab_is_eog(vocab, token)} | ({self.eos_id} if self.eos_id is not None else set())
        )
        self.markers = tuple(text for token in control if (text := self.token_text(token)))
        self.user_markers = tuple(text for token in sorted(user) if (text := self.token_text(token)))
        self.token_bytes = lru_cache(maxsize=1 << 16)(self._token_bytes)

    def encode(self, text: str, *, add_special: bool, parse_special: bool, opening: bool = True) -> list[int]:
        first = opening and not (parse_special and text.startswith(self.markers))
        text = prepare_text(text, normalizer=self._normalizer, space_prefix=self._space_prefix, first=first)
        return self._model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def _token_bytes(self, token: int) -> bytes:
        return self._model.token_bytes(token)

    def token_text(self, token: int) -> str:
        text = llama().llama_vocab_get_text(self._model.vocab, token) if 0 <= token < self._model.n_vocab else None
        return text.decode("utf-8", "replace") if text else ""


def _named(header: GGUFHeader, name: str, token: int) -> int | None:
    """llama.cpp's BOS or EOS, unless it made it up: for a byte-level vocabulary that names none it answers 11, an ordinary token."""
    made_up = header.metadata.get("tokenizer.ggml.model") == "gpt2" and f"tokenizer.ggml.{name}_token_id" not in header.metadata
    return None if token < 0 or made_up else token
