"""From the fields of a body to what the engine takes: `SamplingParams`, `RequestOptions`, a constraint.

One rule for what cannot be honoured: it is refused by name, or, on a lenient server, left out and named in the answer's ``warnings``.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel

from edgeinfer.errors import BadRequest
from edgeinfer.runtime.constraint import Constraint
from edgeinfer.runtime.server.bodies import ChatBody, CompletionBody, GenerationBody
from edgeinfer.runtime.server.error_replies import bad_field
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import BackendInfo, SamplingParams

# Fields that change nothing about an answer.
_IGNORED = frozenset({"service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
# Fields of other servers for things that are not done here, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,), "tfs_z": (1,), "top_a": (0,), "mirostat": (0,), "mirostat_mode": (0,), "dynatemp_range": (0,), "dry_multiplier": (0,),
    "xtc_probability": (0,), "length_penalty": (1,), "use_beam_search": (False,), "id_slot": (-1,), "n_keep": (0,), "n_probs": (0,),
    "min_tokens": (0,), "t_max_predict_ms": (-1, 0), "min_keep": (0,), "samplers": (), "functions": ([],), "audio": (), "modalities": (["text"],),
    "web_search_options": (), "prediction": (), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,), "add_generation_prompt": (True,), "verbosity": ("medium",),
}
_MOST_WARNINGS = 20                      # a body may hold a million fields that nobody knows
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repeat_penalty", "repeat_last_n", "seed", "max_tokens",
    "ignore_eos",
)
_CONSTRAINTS = ("grammar", "json_schema", "regex", "lark")


class Judge:
    """Decides what happens to fields that cannot be honoured, and keeps the warnings."""

    def __init__(self, *, lenient: bool):
        self.lenient = lenient
        self.warnings: list[str] = []

    def unsupported(self, param: str, message: str) -> None:
        """Refuse, or go on without the field."""
        if not self.lenient:
            raise bad_field(param, message, code="unsupported_parameter")
        if len(self.warnings) < _MOST_WARNINGS:
            self.warnings.append(message)

    def unknown_fields(self, body: BaseModel) -> None:
        for name, value in (body.model_extra or {}).items():
            shown = name if name.isidentifier() and len(name) <= 64 else "a field"
            if value is None or name in _IGNORED or any(value == neutral for neutral in _NEUTRAL.get(name, ())):
                continue
            what = "is not supported" if name in _NEUTRAL else "is not known"
            self.unsupported(shown, f"{shown} {what} here; leave it out (/v1/capabilities lists what is).")


def judged(body: GenerationBody, info: BackendInfo, judge: Judge) -> None:
    """Fields that the loaded model or this server cannot honour; on a lenient server they are then unset in ``body``."""
    judge.unknown_fields(body)
    if body.context_policy == "shift" and not info.can_shift:
        judge.unsupported("context_policy", "This model's memory cannot shift; use the context policy truncate_middle or error.")
        body.context_policy = None
    if body.lora is not None and body.lora not in info.adapters:
        known = f"known are {', '.join(info.adapters)}" if info.adapters else "none was given when the server was started"
        judge.unsupported("lora", f"lora names no adapter of this model; {known}.")
        body.lora = None
    if body.cache_prompt is False:
        judge.unsupported("cache_prompt", "cache_prompt cannot be switched off: what is cached is reused, and the answer is the same.")
    if isinstance(body, CompletionBody):
        if body.suffix:
            judge.unsupported("suffix", "suffix is not supported: text is continued, not filled in.")
        if body.best_of not in (None, body.n or 1):
            judge.unsupported("best_of", "best_of is not supported; ask for n answers instead.")


def sampling_params(body: GenerationBody) -> SamplingParams:
    """Ranges are checked by `SamplingParams`, whose errors name the field."""
    fields = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.repetition_penalty is not None:
        if body.repeat_penalty not in (None, body.repetition_penalty):
            raise bad_field("repetition_penalty", "repeat_penalty and repetition_penalty are the same thing; give one.")
        fields["repeat_penalty"] = body.repetition_penalty
    if fields.get("max_tokens", 0) < 0:                  # llama-server's way to ask for no limit
        if fields["max_tokens"] != -1:
            raise bad_field("max_tokens", "max_tokens must be a whole number from 0, or -1 for no limit.")
        del fields["max_tokens"]
    if body.stop is not None:
        fields["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            if body.max_tokens not in (None, body.max_completion_tokens):
                raise bad_field("max_completion_tokens", "max_tokens and max_completion_tokens are the same thing; give one.")
            fields["max_tokens"] = body.max_completion_tokens
        if body.top_logprobs and not body.logprobs:
            raise bad_field("top_logprobs", "top_logprobs needs logprobs: true.")
        if body.logprobs:
            fields["logprobs"] = body.top_logprobs or 0
    elif isinstance(body, CompletionBody):
        fields.setdefault("max_tokens", 16 if body.max_tokens is None else None)     # OpenAI's default for this endpoint
        if body.logprobs is not None:
            fields["logprobs"] = body.logprobs
    return SamplingParams(**fields)


def _logit_bias(given: dict[str, Any]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_field("logit_bias", "logit_bias takes token ids as keys, in decimal digits.")
        if not math.isfinite(value) or abs(value) > 100:
            raise bad_field("logit_bias", "logit_bias takes values from -100 to 100.")
        bias[int(key)] = float(value)
    return bias


def request_fields(body: GenerationBody) -> dict[str, Any]:
    """Fields of `RequestOptions`, without the constraint."""
    given = {"priority": body.priority, "context_policy": body.context_policy, "adapter": body.lora, "speculative": body.speculative}
    return {name: value for name, value in given.items() if value is not None}


# ------------------------------------------------------------------------------------------------------------ structured output


def constraint_of(body: GenerationBody, engine: Engine) -> Constraint | None:
    """What the answer must be like. Compiling takes a while: call it in a thread. Never falls back to free text."""
    given = [name for name in _CONSTRAINTS if getattr(body, name) is not None]
    by_format = _response_format(body.response_format)
    if len(given) + (by_format is not None) > 1:
        names = [*given, *(["response_format"] if by_format is not None else [])]
        raise bad_field(names[0], f"{' and '.join(names)} both say what the answer must be like; give one.")
    if by_format is None and not given:
        return None
    grammars = engine.grammars
    name = given[0] if given else "response_format"
    try:
        if by_format is not None:
            return grammars.json_object() if by_format is True else grammars.json_schema(by_format)
        compiler = {"grammar": grammars.gbnf, "json_schema": grammars.json_schema, "regex": grammars.regex, "lark": grammars.lark}[name]
        return compiler(getattr(body, name))
    except BadRequest as error:
        raise bad_field(name, str(error), code=error.code) from error


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | bool | None:
    """The schema asked for; True for any JSON object, None for free text."""
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")                     # llama-server's short form
        return True if schema is None else _schema(schema, "response_format.schema")
    if kind == "json_schema":
        inner = given.get("json_schema")
        if not isinstance(inner, dict):
            raise bad_field("response_format", "response_format.json_schema must be an object with a schema.")
        return _schema(inner.get("schema"), "response_format.json_schema.schema")
    raise bad_field("response_format", "response_format.type must be text, json_object or json_schema.")


def _schema(schema: Any, where: str) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise bad_field("response_format", f"{where} must be a JSON schema, an object.")
    return schema


def bounded_choices(count: int, limit: int) -> int:
    """``count`` when it is at most ``limit``."""
    if count > limit:
        raise bad_field("n", f"The request asks for {count:,} answers; this server gives at most {limit:,} to one request.")
    return count
