"""What clients send, field by field: OpenAI's names, then those of llama-server and vLLM.

Types are strict: a number in a string is no number. Null means absent. Unknown fields are kept in ``model_extra`` for `parameters` to judge.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

Number = StrictInt | StrictFloat
Object = dict[StrictStr, Any]
Index = Annotated[StrictInt, Field(ge=0)]
Stop = StrictStr | Annotated[list[StrictStr], Field(max_length=64)]
Prompt = StrictStr | list[StrictStr] | list[Index] | list[list[Index]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: StrictStr | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = None        # accepted: it pads nothing here


class GenerationBody(_Body):
    """What both kinds of generation take."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repeat_penalty: Number | None = None
    repetition_penalty: Number | None = None             # vLLM's name for the same
    repeat_last_n: StrictInt | None = None
    seed: StrictInt | None = None
    max_tokens: StrictInt | None = None
    stop: Stop | None = None
    ignore_eos: StrictBool | None = None
    logit_bias: dict[StrictStr, Number] | None = None    # JSON has no other keys: token ids in decimal
    n: Annotated[StrictInt, Field(ge=1)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    priority: Literal["interactive", "batch"] | None = None
    context_policy: Literal["error", "shift", "truncate_middle"] | None = None
    lora: StrictStr | None = None
    speculative: StrictBool | None = None
    response_format: Object | None = None
    grammar: StrictStr | None = None                     # GBNF
    json_schema: Object | StrictBool | None = None
    regex: StrictStr | None = None
    lark: StrictStr | None = None
    timings_per_token: StrictBool | None = None
    return_progress: StrictBool | None = None
    cache_prompt: StrictBool | None = None
    user: StrictStr | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Object], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Object], Field(max_length=256)] | None = None
    tool_choice: StrictStr | Object | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: Object | None = None
    thinking_budget: StrictInt | None = None             # tokens of thinking after which the answer must begin; -1: no limit
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None  # "none": thinking stays in the content
    metadata: Object | None = None
    store: StrictBool | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompt
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None


class EmbeddingsBody(_Body):
    """POST /v1/embeddings"""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None          # the first so many values, made a vector of length 1 again
    user: StrictStr | None = None


class TokenizeBody(_Body):
    """POST /tokenize"""

    content: StrictStr
    add_special: StrictBool = False
    parse_special: StrictBool = True
    with_pieces: StrictBool = False


class DetokenizeBody(_Body):
    """POST /detokenize"""

    tokens: list[Index]


class ApplyTemplateBody(_Body):
    """POST /apply-template"""

    messages: Annotated[list[Object], Field(min_length=1)]
    tools: Annotated[list[Object], Field(max_length=256)] | None = None
    chat_template_kwargs: Object | None = None
