"""Token ids to text, as they come.

One rule: text leaves only when its last byte has arrived, so joining what `Detokenizer.push` and `Detokenizer.flush` return gives exactly what
decoding all bytes at once would, wherever the tokens divide them.
"""

from __future__ import annotations

import codecs

from edgeinfer.runtime.backend import Vocab

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental UTF-8 decoder over a vocabulary's token bytes, for one answer.

    Bytes that may still become a character are held back. Bytes that cannot be UTF-8 become U+FFFD, one for each broken character (what
    ``bytes.decode(errors="replace")`` does), and so does a character cut short by the end of the answer.

    The text continues a prompt, so a leading space that the first token carries ("▁Hello" in SentencePiece vocabularies) is kept: dropping it here
    would glue the answer to a raw prompt. Callers who show an answer on its own may strip it.

    shown: control tokens whose marker belongs to the text: those by which a model says that it calls a tool or thinks.
    """

    def __init__(self, vocab: Vocab, shown: frozenset[int] = frozenset()):
        self._vocab = vocab
        self._shown = shown
        self._decoder = _new_decoder("replace")

    def push(self, token: int) -> str:
        """The characters that ``token`` completes; "" when there are none yet."""
        vocab = self._vocab
        return self._decoder.decode(vocab.token_text(token).encode() if token in self._shown else vocab.token_bytes(token))

    def flush(self) -> str:
        """What is still held back at the end of the answer: U+FFFD or ""; afterwards the decoder starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
