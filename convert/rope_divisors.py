"""Rope scalings that llama.cpp takes as one divisor for each rotated pair (a tensor) instead of a rule (a key).

A pair that turns with frequency theta ** (-2i / d) turns with that divided by its divisor once the scaling is applied.
"""

from __future__ import annotations

import math

from edgeinfer.models.spec import RopeSpec

YARN_BETAS = (32.0, 1.0)                                 # the only beta_fast and beta_slow llama.cpp's own yarn rule uses


def needs_divisors(rope: RopeSpec) -> bool:
    """True where the scaling is written as ``rope_freqs.weight``."""
    return rope.type == "llama3" or (rope.type == "yarn" and yarn_betas(rope) != YARN_BETAS)


def yarn_betas(rope: RopeSpec) -> tuple[float, float]:
    fast, slow = YARN_BETAS
    return (fast if rope.beta_fast is None else rope.beta_fast, slow if rope.beta_slow is None else rope.beta_slow)


def divisors(rope: RopeSpec) -> tuple[float, ...]:
    """One for each of the ``rotary_dim // 2`` pairs, 1 where the pair keeps its frequency and ``factor`` where it is stretched whole."""
    kept = llama3_kept(rope) if rope.type == "llama3" else yarn_kept(rope)
    return tuple(1.0 / ((1 - share) / rope.factor + share) for share in kept)


def llama3_kept(rope: RopeSpec) -> list[float]:
    """Share of each pair's own frequency, by its turns within the original context: all above high_freq_factor, none below low_freq_factor."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = [rope.original_context / (2 * math.pi * rope.theta ** (2 * pair / rope.rotary_dim)) for pair in range(rope.rotary_dim // 2)]
    return [min(1.0, max(0.0, (turn - low) / (high - low))) for turn in turns]


def yarn_kept(rope: RopeSpec) -> list[float]:
    """The same for YaRN (Peng et al. 2023), whose ramp runs over pair numbers between the two that turn beta_fast and beta_slow times."""
    fast, slow = yarn_betas(rope)

    def pair_turning(times: float) -> float:
        return rope.rotary_dim * math.log(rope.original_context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = max(0, math.floor(pair_turning(fast)))
    last = min(rope.rotary_dim - 1, math.ceil(pair_turning(slow)))
    width = (last - first) or 0.001
    return [1.0 - min(1.0, max(0.0, (pair - first) / width)) for pair in range(rope.rotary_dim // 2)]


def yarn_attention_factor(rope: RopeSpec) -> float:
    """Multiplier of cos and sin under yarn."""
    return rope.attention_factor if rope.attention_factor is not None else 1.0 + 0.1 * math.log(rope.factor)
