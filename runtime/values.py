"""The values that cross a boundary of the runtime: request in, plan and result between scheduler and backend, events out.

They are plain and frozen, and know nothing of threads, files, wire formats or screens.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.constraint import Constraint

# ---------------------------------------------------------------------------------------------------------------- request


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # NaN compares false with everything, so the test asks for what is right instead of what is wrong.
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not (ok and (low < value if open_low else low <= value) and value <= high):
        raise BadRequest(f"{name} must be a number {'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}, not {value!r}.")


MAX_LOGPROBS = 20


def _alternatives(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_LOGPROBS:
        raise BadRequest(f"{name} must be a whole number from 0 to {MAX_LOGPROBS}, not {value!r}.")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The order is llama.cpp's: penalties, top-k, top-p, min-p, temperature. Defaults are llama.cpp's."""

    temperature: float = 0.8             # 0 is greedy
    top_k: int = 40                      # 0 turns it off
    top_p: float = 0.95                  # 1 turns it off
    min_p: float = 0.05                  # 0 turns it off; relative to the most likely token
    repeat_penalty: float = 1.0          # 1 turns it off; multiplicative, over the last `repeat_last_n` tokens
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64              # tokens the three penalties look back over, prompt included; -1 the whole context
    seed: int | None = None              # None draws one; the seed used is reported in Usage
    max_tokens: int | None = None        # None: until the model stops or the context is full
    stop: tuple[str, ...] = ()           # the text ends before the first of these
    ignore_eos: bool = False             # keep going past end-of-turn tokens (benchmarks)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None          # report each token's log-probability and so many alternatives, 0 .. 20; None: do not

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0, 100)
        _in_range("top_p", self.top_p, 0, 1, open_low=True)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("repeat_penalty", self.repeat_penalty, 0, 100, open_low=True)
        _in_range("presence_penalty", self.presence_penalty, -10, 10)
        _in_range("frequency_penalty", self.frequency_penalty, -10, 10)
        if self.logprobs is not None:
            _alternatives("logprobs", self.logprobs)
        for name, low in (("top_k", 0), ("repeat_last_n", -1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise BadRequest(f"{name} must be a whole number from {low}, not {value!r}.")
        if self.max_tokens is not None and (not isinstance(self.max_tokens, int) or isinstance(self.max_tokens, bool) or self.max_tokens < 0):
            raise BadRequest(f"max_tokens must be a whole number from 0, not {self.max_tokens!r}.")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise BadRequest(f"seed must be a whole number, not {self.seed!r}.")
        # -1 is how llama.cpp's users ask for a random seed.
        if self.seed is not None and self.seed < 0:
            object.__setattr__(self, "seed", None)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise BadRequest("stop must be a non-empty string or a list of them.")
        object.__setattr__(self, "stop", stop)

    @classmethod
    def of(cls, base: SamplingParams | None = None, **changes: Any) -> SamplingParams:
        """``base`` (or the defaults) with the named fields changed; an unknown name is a `BadRequest` that lists the known ones."""
        unknown = sorted(set(changes) - set(cls.__dataclass_fields__))
        if unknown:
            raise BadRequest(f"Unknown sampling parameter {unknown[0]!r}; known are {', '.join(cls.__dataclass_fields__)}.")
        return replace(base or cls(), **changes)


PRIORITIES = ("interactive", "batch")
CONTEXT_POLICIES = ("error", "shift", "truncate_middle")


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks of the engine, beyond how its tokens are chosen."""

    priority: str = "interactive"        # "batch" waits for everybody interactive, though not for ever
    context_policy: str = "error"        # what happens when the context is full: "error", "shift" or "truncate_middle"
    adapter: str | None = None           # name of a LoRA adapter that was given at load
    speculative: bool = True             # may be drafted, where the engine was loaded with a drafter
    constraint: Constraint | None = None  # what the answer must be like: a grammar, a schema
    prompt_logprobs: int | None = None   # report each prompt token's log-probability and so many alternatives, 0 .. 20; None: do not
    shown: frozenset[int] = frozenset()  # control tokens whose marker is part of the text; all others are not shown

    def __post_init__(self) -> None:
        for name, value, known in (("priority", self.priority, PRIORITIES), ("context_policy", self.context_policy, CONTEXT_POLICIES)):
            if value not in known:
                raise BadRequest(f"{name} must be one of {', '.join(known)}, not {value!r}.")
        if self.adapter is not None and not (isinstance(self.adapter, str) and self.adapter):
            raise BadRequest(f"adapter must be the name of an adapter, not {self.adapter!r}.")
        if not isinstance(self.speculative, bool):
            raise BadRequest(f"speculative must be true or false, not {self.speculative!r}.")
        if self.prompt_logprobs is not None:
            _alternatives("prompt_logprobs", self.prompt_logprobs)


# ------------------------------------------------------------------------------------------------------ scheduler <-> backend
# Named tuples, not dataclasses: several are made in every step, between two tokens, and a frozen dataclass takes four times as long to make.


class Chunk(NamedTuple):
    """Tokens of one sequence to run in this step, at positions ``start .. start + len(tokens)`` of slot ``slot``."""

    slot: int
    start: int
    tokens: Seq[int]
    n_logits: int                        # of the chunk's last tokens, how many rows of logits are wanted: 0, 1, or 1 + drafted tokens
    alone: bool = False                  # in a native batch of its own: kernels round differently by the number of rows in a batch
    adapter: str | None = None           # LoRA adapter to compute with; one of BackendInfo.adapters


class StepPlan(NamedTuple):
    """One step. At most one chunk a slot; decoders (one token each, and what was drafted to follow it) come first."""

    decodes: tuple[Chunk, ...] = ()
    prefills: tuple[Chunk, ...] = ()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.decodes + self.prefills


class StepResult(NamedTuple):
    """What became of a plan, chunk by chunk.

    ``logits`` maps a slot whose chunk wanted logits to a float32 array of shape (n_logits, n_vocab). Arrays are views that stay valid until the
    next ``forward``. A slot in ``no_room``, ``aborted`` or ``failed`` has the same KV as before the step: its chunk did not happen.
    """

    logits: Mapping[int, np.ndarray]
    no_room: tuple[int, ...] = ()
    aborted: tuple[int, ...] = ()
    failed: Mapping[int, str] = MappingProxyType({})


# ----------------------------------------------------------------------------------------------------------------- events


class FinishReason(str, enum.Enum):
    """Why an answer ended, in the words of OpenAI's API where it has one."""

    STOP = "stop"                        # end-of-turn token or stop string
    LENGTH = "length"                    # max_tokens, or the context is full
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Usage:
    """Token counts of one request, and the seed that repeats it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0               # prompt tokens whose KV was reused
    completion_tokens: int = 0
    seed: int = 0
    cache_miss: str | None = None        # why nothing (or less than hoped) was reused; None when all that could be was
    dropped_tokens: int = 0              # conversation tokens that the context policy let go, from the prompt and by shifts

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Durations of one request in milliseconds, on the engine's monotonic clock. Names follow llama-server's ``timings``."""

    queue_ms: float = 0.0                # submitted -> first scheduled
    cache_n: int = 0
    prompt_n: int = 0                    # prompt tokens computed, i.e. not reused
    prompt_ms: float = 0.0               # first scheduled -> first token
    predicted_n: int = 0
    predicted_ms: float = 0.0            # first token -> last token
    first_token_ms: float | None = None  # submitted -> first token (TTFT)
    last_second_per_second: float = 0.0  # decode tokens/s over the last second
    itl_p50_ms: float = 0.0              # gaps between consecutive tokens (inter-token latency)
    itl_p99_ms: float = 0.0
    itl_max_ms: float = 0.0
    draft_n: int = 0                     # tokens drafted for this answer, and how many of them were right
    draft_n_accepted: int = 0
    preemptions: int = 0                 # times its KV was taken away and computed again
    shifts: int = 0                      # times old tokens were dropped to make room in the context

    @property
    def prompt_per_second(self) -> float:
        return 1e3 * self.prompt_n / self.prompt_ms if self.prompt_ms > 0 else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Decode rate: the first token belongs to the prompt's time, so n - 1 tokens fill the decode interval."""
        return 1e3 * (self.predicted_n - 1) / self.predicted_ms if self.predicted_n > 1 and self.predicted_ms > 0 else 0.0

    def as_dict(self) -> dict[str, float | int | None]:
        """JSON-ready, rates included."""
        values: dict[str, float | int | None] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values |= {"prompt_per_second": self.prompt_per_second, "predicted_per_second": self.predicted_per_second}
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


@dataclass(frozen=True)
class TokenLogprob:
    """One token and how likely the model found it, before any sampling parameter, together with the likeliest alternatives."""

    token: int
    logprob: float                       # natural logarithm
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), the likeliest first; as many as were asked for


@dataclass(frozen=True)
class TextDelta:
    """Text that is final: whole characters, no part of a stop string.

    ``logprobs``: where they were asked for, the tokens that this text completes, one entry each. Joined over an answer they are its tokens in order;
    a token that adds no text yet (half a character, held back as the start of a stop string) comes with the piece that does, or with a last one, whose
    text may be empty. The end-of-turn token has no entry, nor has what lies wholly in the stop string that ended the answer.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PromptLogprobs:
    """Sent once, when the prompt has been read, where ``prompt_logprobs`` were asked for: one entry a prompt token, None for the first."""

    entries: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True)
class PrefillProgress:
    """Prompt tokens ready (computed or reused) of all; sent after each prefill step."""

    done: int
    total: int
    cached: int
    elapsed_ms: float                    # since first scheduled


@dataclass(frozen=True)
class Finished:
    """Always the last event of a request that did not fail."""

    reason: FinishReason
    usage: Usage
    timings: Timings


@dataclass(frozen=True)
class Failed:
    """Always the last event of a request that failed; ``error`` is an `EdgeInferError`."""

    error: Exception
    usage: Usage
    timings: Timings


Event = TextDelta | PrefillProgress | PromptLogprobs | Finished | Failed


# ------------------------------------------------------------------------------------------------------------- capabilities


@dataclass(frozen=True)
class BackendInfo:
    """What a loaded backend is and can do; looked up once, never probed by name."""

    engine: Literal["llamacpp", "onnxruntime", "fake"]
    device: str                          # "cpu", "cuda:0"
    model: str                           # for people
    quantization: str                    # "Q4_K_M", "F16"
    n_vocab: int
    n_ctx: int                           # positions one sequence may use
    n_ctx_train: int
    max_slots: int                       # conversations whose KV can be held, running or idle
    max_batch: int                       # tokens one forward accepts
    kv_type: str                         # "f16", "q8_0/q8_0"
    kv_bytes_per_token: int
    weight_bytes: int
    max_seqs: int = 0                    # sequences that may run at once; 0: as many as slots
    max_logits: int = 0                  # rows of logits one forward can give; 0: one per token
    kv_cells: int = 0                    # tokens that all slots together hold; 0: n_ctx each
    fingerprint: str = ""                # identity of the weights; equal for the same model only
    adapters: tuple[str, ...] = ()       # names of the LoRA adapters given at load
    shared_cells: bool = False           # slots share one pool of KV cells, and copies of a prefix share its cells
    can_copy_prefix: bool = True
    copy_tokens: int = 0                 # prefixes shorter than this are computed sooner than copied
    can_shift: bool = False              # Backend.shift works
    can_export: bool = False             # Backend.export_slot and import_slot work
    can_generate: bool = True            # False for an encoder, which only embeds
    can_embed: bool = False              # Backend.embed works
    n_embd: int = 0                      # values of one embedding; 0: not known
    layers_offloaded: int = 0
    layers: int = 0
    attention_depth: int = 0             # context at which attention takes about as long as all else a prompt token needs; 0: not known
    threads: int = 0                     # that compute a token; 0: not known
    system: str = ""                     # instruction sets and build flags
    notices: tuple[str, ...] = ()        # what was asked for and is done differently, one sentence each
