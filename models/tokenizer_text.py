"""What has to happen to a text before llama.cpp tokenizes it, for the few tokenizers that do more to a text than llama.cpp can.

The converter notes it in the GGUF under the two keys below; whoever feeds text to llama.cpp calls `prepare_text`. The parity check does the same.
"""

from __future__ import annotations

import unicodedata

NORMALIZER_KEY = "edgeinfer.tokenizer.normalizer"        # "NFC"
SPACE_PREFIX_KEY = "edgeinfer.tokenizer.space_prefix"    # "first"


def prepare_text(text: str, *, normalizer: str = "", space_prefix: str = "", first: bool = True) -> str:
    """``text`` as the source's tokenizer would see it. ``first``: it opens the prompt, no marker before it and not a marker itself.

    normalizer: "" or "NFC". space_prefix: "" or "first": one space before the first word of a prompt, unless there is one.
    """
    if normalizer == "NFC":
        text = unicodedata.normalize("NFC", text)
    if space_prefix == "first" and first and text and text[0] not in " \u2581":
        text = " " + text
    return text
