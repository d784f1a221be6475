"""Which GGUF of a repository or folder to take, by quantisation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edgeinfer.errors import ModelNotFound

PART_NAME = re.compile(r"^(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")      # a split model's file
# Without a wish: small enough for any machine at little loss, then the nearest neighbours of that.
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "IQ4_NL", "Q4_1", "Q5_K_M", "Q5_K_S", "Q5_0", "Q6_K", "Q8_0", "Q3_K_M", "F16", "BF16", "F32")
_QUANT = re.compile(r"(?<![A-Z0-9])(I?Q\d(?:_[01KSML]|_NL|_XL|_XXS|_XS)*|TQ\d_0|MXFP4(?:_MOE)?|BF16|F16|F32|FP16|FP32)(?![A-Z0-9])")
_NO_MODELS = re.compile(r"(?:^|[-._/])(mmproj|imatrix|vocab|mtp)[-._]", re.IGNORECASE)
_SAME = {"FP16": "F16", "FP32": "F32"}


@dataclass(frozen=True)
class GGUFChoice:
    """One model: its first file, every file it needs, its quantisation ("" when the name does not say)."""

    first: str
    files: tuple[str, ...]
    quantization: str


def quantization_of(name: str) -> str:
    """The quantisation a file name ends with, in upper case; "" when it names none."""
    found = _QUANT.findall(name.rsplit("/", 1)[-1].upper().removesuffix(".GGUF"))
    return _SAME.get(found[-1], found[-1]) if found else ""


def choices(names: Iterable[str]) -> list[GGUFChoice]:
    """The models among file names; the parts of a split one count as one, projectors and the like not at all."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        base = name.rsplit("/", 1)[-1]
        if not name.lower().endswith(".gguf") or _NO_MODELS.search(base):
            continue
        part = PART_NAME.match(base)
        key = name[: len(name) - len(base)] + (f"{part['base']} of {part['count']}" if part else base)
        groups.setdefault(key, []).append(name)
    return [GGUFChoice(files[0], tuple(files), quantization_of(PART_NAME.sub(r"\g<base>", files[0].rsplit("/", 1)[-1]))) for files in groups.values()]


def choose(names: Iterable[str], wish: str | None, where: str) -> GGUFChoice:
    """The model of the wished quantisation, or the preferred one. Raises `ModelNotFound` that lists what there is."""
    found = choices(names)
    if not found:
        raise ModelNotFound(f"{where} holds no GGUF model.")
    if wish is not None:
        wish = _SAME.get(wish.upper(), wish.upper())
        for choice in found:
            if choice.quantization == wish:
                return choice
        there = ", ".join(sorted({choice.quantization or choice.first for choice in found}))
        raise ModelNotFound(f"{where} has no {wish}; it has {there}.")
    if len(found) == 1:
        return found[0]
    for quantization in PREFERRED:
        for choice in found:
            if choice.quantization == quantization:
                return choice
    return found[0]
