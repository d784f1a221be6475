"""Which tokens end an answer: the union of every place of a checkpoint that names one, and the GGUF keys that carry it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Ends of a turn that chat templates write. A template that names one which is a token ends its turns with it.
TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<turn|>",
    "<end_of_utterance>", "[EOT]", "<EOT>", "<|return|>",
)
# Texts that llama.cpp itself takes for the end of generation, whatever the keys say.
KNOWN_TO_LLAMA_CPP = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
    "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))


@dataclass(frozen=True)
class StopTokens:
    """``ids``: every stop token of the source, sorted. eos, eot, eom: what the three keys of a GGUF say, None where a key is not needed.

    unreached: stop tokens that neither the keys nor llama.cpp's own knowledge cover; only a reader of ``edgeinfer.stop_token_ids`` stops there.
    """

    ids: tuple[int, ...]
    eos: int | None
    eot: int | None
    eom: int | None
    unreached: tuple[int, ...]


def as_ids(value: Any) -> list[int]:
    """``eos_token_id`` of a config: one id, a list of ids, or nothing."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0]


def collect(
    eos: int | None, configs: list[Mapping[str, Any]], template: str | None, tokens: Mapping[str, int], texts: Sequence[str]
) -> StopTokens:
    """``eos``: the tokenizer's own end token. ``configs``: config.json and generation_config.json.

    ``tokens``: text -> id of control and added tokens. ``texts``: the vocabulary by id.
    """
    listed = [token for config in configs for token in as_ids(config.get("eos_token_id"))]
    if eos is None and listed:
        eos = listed[0]
    turn_ends = [tokens[text] for text in TURN_ENDS if text in tokens and template is not None and text in template]
    ids = {*([] if eos is None else [eos]), *listed, *turn_ends}
    # A turn's end goes to the key of that name: llama.cpp's programs read it when they build prompts. It is the only one that needs no other reason.
    eot = next((token for token in turn_ends if token != eos and texts[token] != "<|eom_id|>"), None)
    named = [token for token in sorted(ids) if token not in (eos, eot)]
    left = [token for token in named if token >= len(texts) or texts[token] not in KNOWN_TO_LLAMA_CPP]
    if eot is None and left:
        eot = left.pop(0)
    eom = left.pop(0) if left else None
    return StopTokens(tuple(sorted(ids)), eos, eot, eom, tuple(left))
