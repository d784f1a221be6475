"""From the rules in tokenizer.json to llama.cpp's name for a byte-level pre-tokenizer (``tokenizer.ggml.pre``).

One rule: two tokenizers have the same name only when they cut every text at the same places. So the whole structure is compared (normaliser, each
step, each regular expression, whether merges may be ignored), never the class name; what is not in the table is refused, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgeinfer.errors import ConversionFailed

# Regular expressions by a short name of ours. Published with the tokenizers themselves; the notes say whose.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}": "llama3",             # Llama 3, GPT-4, Phi-4
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}": "qwen2",                     # Qwen2, Qwen2.5, Qwen3
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen35",
    _CASED % ("", "") + r"\p{N}|" + _CASED_TAIL: "tekken",                                           # Mistral Nemo
    _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"\p{N}{1,3}|" + _CASED_TAIL: "o200k",     # GPT-4o, Phi-4-mini, Llama 4
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",           # what ByteLevel does by itself
    r"\p{N}{1,3}": "digits3",
    "[一-龥\u3040-ゟ゠-ヿ]+": "cjk",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]"""
    r"""+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""": "deepseek3",
}
# The same places written differently: GPT-4's own spelling (a possessive quantifier cannot change what these match, since the
# neighbouring classes are disjoint), and contractions with both cases spelled out.
_REWRITES = (
    (r"'(?i:[sdmt]|ll|ve|re)", _CONTRACTIONS),
    (r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _CONTRACTIONS),
    ("]++", "]+"),
    ("]?+", "]?"),
    (r"\s*[\r\n]|", r"\s*[\r\n]+|"),
)

Steps = tuple[str, ...]


@dataclass(frozen=True)
class PreTokenizer:
    """What llama.cpp is told, and what it cannot do.

    normalizer: "" or "NFC", which llama.cpp does not apply to byte-level text: whoever feeds it does.
    approximate: llama.cpp replaces the letter classes of this expression by coarser ones, so that capitals outside ASCII and combining marks may be
    cut elsewhere; ids can differ there and a parity check must not fail for it alone.
    """

    name: str
    normalizer: str = ""
    approximate: bool = False


# (steps, model.ignore_merges) -> llama.cpp's name, which stands for both: "llama-bpe" and "tekken" take a word that is a token as it is.
TABLE: dict[tuple[Steps, bool], str] = {
    (("gpt2",), False): "gpt-2",
    (("digit", "gpt2"), False): "smollm",                                  # also StarCoder, Command-R
    (("llama3",), True): "llama-bpe",
    (("llama3",), False): "dbrx",                                          # the same cuts, merges always looked at: Phi-4
    (("qwen2",), False): "qwen2",
    (("qwen35",), False): "qwen35",
    (("tekken",), True): "tekken",
    (("o200k",), False): "gpt-4o",
    (("digits3", "cjk", "deepseek3"), False): "deepseek-v3",
}
APPROXIMATE = frozenset({"tekken", "gpt-4o"})

# Every name the pinned llama.cpp accepts, for --pre: the user vouches for the choice and the parity check judges it.
NAMES = frozenset("""
    default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano deepseek-llm deepseek-coder deepseek-v3 spark2_5
    youtu falcon mpt starcoder gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4
    granite-embed-multi-311m sarvam-moe jina-v1-en jina-v2-code roberta-bpe whitespace refact command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35
    stablelm2 olmo dbrx smaug-bpe poro-chat chatglm-bpe glm4 glm5 viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 exaone-moe
    chameleon minerva-7b megrez gpt-4o llama4 kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe trillion granite-docling
    bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2 ufakzeka grok-2 afmoe laguna minimax-m2 solar-open
    mellum2
""".split())


def identify(tokenizer: dict[str, Any], *, pre: str | None = None) -> PreTokenizer:
    """llama.cpp's pre-tokenizer for a parsed byte-level tokenizer.json. ``pre`` names it by hand.

    Raises `ConversionFailed` that says which rules are unknown and what can be named instead.
    """
    problems: list[str] = []
    normalizer = _normalizer(tokenizer.get("normalizer"), problems, by_hand=pre is not None)
    if pre is None:
        steps = tuple(_steps(tokenizer.get("pre_tokenizer")))
        ignore_merges = bool(tokenizer["model"].get("ignore_merges"))
        name = TABLE.get((steps, ignore_merges))
        if name is None:
            problems.append(_unknown(steps, ignore_merges))
    else:
        name = pre
        if name not in NAMES:
            problems.append(f"--pre {pre} is not a pre-tokenizer that llama.cpp knows; known are {_known()}.")
    if len(problems) == 1:
        raise ConversionFailed(problems[0])
    if problems:
        raise ConversionFailed("The rules of tokenizer.json are not supported:", problems)
    return PreTokenizer(name, normalizer, name in APPROXIMATE)


def flatten(part: dict[str, Any] | None, children: str) -> list[dict[str, Any]]:
    """The steps of a Sequence, however nested, in order. None and an empty Sequence are no steps."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for child in part.get(children) or [] for step in flatten(child, children)]
    return [part]


def canonical(expression: str) -> str:
    """An expression with known spelling variants undone."""
    for variant, plain in _REWRITES:
        expression = expression.replace(variant, plain)
    return expression


def _steps(part: dict[str, Any] | None) -> list[str]:
    steps: list[str] = []
    for step in flatten(part, "pretokenizers"):
        kind = step.get("type")
        if kind == "ByteLevel":
            if step.get("add_prefix_space"):
                steps.append("ByteLevel(add_prefix_space=True)")
            elif step.get("use_regex", True):
                steps.append("gpt2")
        elif kind == "Digits":
            steps.append("digit" if step.get("individual_digits") else "Digits(individual_digits=False)")
        elif kind == "Split":
            steps.append(_split(step))
        else:
            steps.append(f"{kind}({', '.join(f'{key}={value!r}' for key, value in step.items() if key != 'type')})")
    return steps


def _split(step: dict[str, Any]) -> str:
    pattern = step.get("pattern") or {}
    expression = pattern.get("Regex")
    behavior, invert = step.get("behavior"), bool(step.get("invert"))
    name = SPLITS.get(canonical(expression)) if isinstance(expression, str) else None
    # Known expressions but the two short ones match everywhere, so nothing lies between matches: "Removed" what is between them is "Isolated".
    covers = name not in ("digits3", "cjk", None)
    if name is not None and (behavior == "Isolated" or (behavior == "Removed" and invert and covers)):
        return name
    return f"Split({pattern!r}, behavior={behavior}, invert={invert})"


def _normalizer(part: dict[str, Any] | None, problems: list[str], *, by_hand: bool) -> str:
    steps = flatten(part, "normalizers")
    kinds = [step.get("type") for step in steps]
    if kinds in ([], ["NFC"]):
        return "".join(kinds)
    way_out = "llama.cpp's byte-level vocabularies have no normaliser, and --pre cannot add one" if by_hand else "known are none and NFC"
    problems.append(f"The normaliser of tokenizer.json ({', '.join(map(str, kinds))}) is not supported: {way_out}.")
    return ""


def _unknown(steps: Steps, ignore_merges: bool) -> str:
    known = set(SPLITS.values()) | {"digit"}
    strange = [step for step in steps if step not in known]
    if strange:
        what = f"has a rule that is not known: {strange[0]}"
    elif not steps:
        what = "does not cut text at all"
    else:
        what = f"combines known rules in a way that no known model does: {' then '.join(steps)}, ignore_merges={ignore_merges}"
    return (
        f"The pre-tokenizer in tokenizer.json {what}. If one of llama.cpp's pre-tokenizers cuts text the same way, name it with --pre NAME "
        f"(recognised by themselves: {', '.join(sorted(TABLE.values()))}; all names: {_known()})."
    )


def _known() -> str:
    return ", ".join(sorted(NAMES))
