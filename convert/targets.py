"""The words after ``--to``, and what they mean to llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.errors import BadRequest

SHORT = {"Q8": "Q8_0", "Q4": "Q4_K_M"}
PREFIX = "gguf-"
# Kinds llama.cpp names and its quantiser cannot make from a dense model.
NOT_OFFERED = {"NVFP4", "MXFP4_MOE"}


@dataclass(frozen=True)
class Target:
    """A GGUF file type. ``name`` is llama.cpp's ("Q4_K_M"), ``number`` its ftype, ``plain`` True for F32, F16 and BF16."""

    name: str
    number: int
    plain: bool

    @property
    def word(self) -> str:
        return PREFIX + self.name.lower()


def file_types() -> dict[str, int]:
    """Name -> ftype number, from llama.cpp itself."""
    from edgeinfer.models.native import llama

    types: dict[str, int] = {}
    for constant, number in vars(llama()).items():
        for prefix in ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_"):
            if constant.startswith(prefix):
                types[constant.removeprefix(prefix)] = number
    return {name: number for name, number in types.items() if name not in NOT_OFFERED}


def parse_target(word: str) -> Target:
    """"gguf-q4" -> Q4_K_M. Raises `BadRequest` that lists what there is."""
    types = file_types()
    name = word.lower().removeprefix(PREFIX).upper()
    name = SHORT.get(name, name)
    if not word.lower().startswith(PREFIX) or name not in types:
        known = ", ".join(sorted(PREFIX + name.lower() for name in types))
        raise BadRequest(f"There is no target {word!r}; known are gguf-q8 (gguf-q8_0), gguf-q4 (gguf-q4_k_m), {known}.")
    return Target(name=name, number=types[name], plain=name in ("F32", "F16", "BF16"))
