"""The engine as other programs meet it: thread-safe, streaming, closable."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import BadRequest, EdgeInferError, UnsupportedParameter
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.runtime.backend import Backend
from edgeinfer.runtime.chat_format import encode_chat, encode_prompt
from edgeinfer.runtime.constraint import checked
from edgeinfer.runtime.context_policy import Fit, answer_limit, fit_chat, fit_prompt
from edgeinfer.runtime.detokenizer import Detokenizer
from edgeinfer.runtime.embedding import Embedder, Embeddings, embedding_tokens
from edgeinfer.runtime.engine import EngineCore, EngineCounters
from edgeinfer.runtime.health import EngineOptions, Health
from edgeinfer.runtime.loop import EngineLoop
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.sequence import Sequence, Status
from edgeinfer.runtime.stats import EngineStats, snapshot
from edgeinfer.runtime.stream import Stream
from edgeinfer.runtime.values import BackendInfo, Event, RequestOptions, SamplingParams

if TYPE_CHECKING:
    from edgeinfer.runtime.kv_spill import KVPersistence
    from edgeinfer.runtime.speculative import Speculator
    from edgeinfer.runtime.structured import Grammars


class Engine:
    """A loaded model that answers many requests at once. Make one with `edgeinfer.load`.

    Thread-safe. Requests are checked and tokenised in the caller's thread, so what is wrong with them is raised right there; what goes wrong later
    arrives in the stream.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        options: SchedulerOptions = SchedulerOptions(),
        speculator: Speculator | None = None,
        persistence: KVPersistence | None = None,
        engine_options: EngineOptions = EngineOptions(),
    ):
        self.info: BackendInfo = backend.info
        self.vocab = backend.vocab
        self._options = options
        self._persistence = persistence
        self._chat_template_source = chat_template or backend.vocab.chat_template
        self._started = time.monotonic()
        core = EngineCore(backend, options, speculator, persistence)
        self.counters: EngineCounters = core.counters
        self._core = core
        self._loop = EngineLoop(core, engine_options)
        self._embedder = Embedder(backend, self._loop, max_waiting=options.max_waiting)
        # At interpreter exit too: a native compute must not be running while the process is taken apart.
        self._finalizer = weakref.finalize(self, self._loop.close)

    # ------------------------------------------------------------------------------------------------------------- requests

    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: list[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Stream:
        """Answer a conversation: ``[{"role": "user", "content": "..."}]``, rendered with the model's own chat template.

        ``tools``: definitions of functions that the template shows to the model; ``template_kwargs``: further variables of the template, e.g.
        ``enable_thinking``. ``fields`` are those of `SamplingParams`, over ``params``, over the defaults, and those of `RequestOptions` (priority,
        context_policy, ...). Raises `BadRequest` and its kin at once.
        """
        options = self._options_of(fields)
        params = SamplingParams.of(params, **fields)
        encode = partial(self._encode, **_template_variables(tools, template_kwargs))
        return self._submit(fit_chat(encode, messages, self.info.n_ctx, options.context_policy, params.max_tokens), params, options)

    def generate(self, prompt: str | Iterable[int], params: SamplingParams | None = None, **fields: Any) -> Stream:
        """Continue a raw prompt: text (markers in it are honoured) or token ids taken as they are. ``fields`` as for `chat`."""
        options = self._options_of(fields)
        params = SamplingParams.of(params, **fields)
        tokens = encode_prompt(self.vocab, prompt) if isinstance(prompt, str) else self._checked(prompt)
        return self._submit(fit_prompt(tokens, 0, self.info.n_ctx, options.context_policy, params.max_tokens), params, options)

    def embed(self, inputs: Iterable[str | list[int]]) -> Embeddings:
        """A vector of length 1 for each input: a text (with the special tokens that the model wants) or token ids taken as they are.

        Pooled as the model says, the mean of the last hidden states where it says nothing. A vector depends on its input alone. Long ones give way to
        running answers after each piece. Raises at once what is wrong with the inputs, `ContextLengthExceeded` for one that is too long.
        """
        future = self._embedder.submit(embedding_tokens(self.vocab, self.info, inputs))
        try:
            error = future.exception()
        finally:
            future.cancel()                              # an interrupt while waiting
        if error is not None:
            raise error.with_traceback(None)             # several callers may share it
        return future.result()

    async def aembed(self, inputs: Iterable[str | list[int]]) -> Embeddings:
        """The same for asyncio. Cancelling the task takes the inputs out within a piece."""
        tokens = await asyncio.to_thread(embedding_tokens, self.vocab, self.info, inputs)
        return await asyncio.wrap_future(self._embedder.submit(tokens))

    def count_tokens(self, messages: Iterable[Mapping[str, Any]]) -> int:
        """Prompt tokens that `chat` would send for these messages, were there room for all of them."""
        return len(self._encode(messages))

    def render_chat(
        self, messages: Iterable[Mapping[str, Any]], tools: list[Any] | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> str:
        """The text that the chat template makes of a conversation; arguments and errors as for `chat`."""
        return self._template.render(messages, **_template_variables(tools, template_kwargs))

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of a text. ``add_special`` adds BOS and EOS as the model wants, ``parse_special`` reads markers in it as their control tokens."""
        return self.vocab.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Iterable[int]) -> str:
        """The text of token ids, control tokens as they are written in templates; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, self._checked(tokens))).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for: the bytes of its text, for a control token those of its marker."""
        return self.vocab.token_bytes(token) or self.vocab.token_text(token).encode()

    @property
    def chat_template_source(self) -> str | None:
        """The chat template in use: the one given at load, or the model's own; None where there is neither."""
        return self._chat_template_source

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles what answers can be constrained by (``constraint=``) for this model's vocabulary, and remembers it."""
        from edgeinfer.runtime.structured import Grammars     # llguidance is loaded for those who ask for it

        return Grammars(self.vocab, self.info.n_vocab)

    @property
    def notices(self) -> tuple[str, ...]:
        """What is done differently than was asked for at load, and what went wrong without hurting a request; one sentence each."""
        return self.info.notices + (self._persistence.notices if self._persistence is not None else ())

    def drop_cache(self) -> None:
        """Give back the memory of the KV cache while nobody asks anything; the weights stay, and the next request takes the memory again.

        Idle conversations are forgotten, or saved where the engine was loaded with ``kv_cache_dir``. On llama.cpp KV cache and compute buffers are
        freed, and made anew by the next request, which takes about a second a GiB; a draft model keeps its own. Returns at once; no effect while a
        request is inside. Raises `EngineClosed` and `BackendFailed` as a request would.
        """
        self._loop.post(self._core.drop_cache)

    # ------------------------------------------------------------------------------------------------------------- lifetime

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def health(self) -> Health:
        """Whether it works, and if not, why. From any thread, at no cost."""
        return self._loop.health()

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment. From any thread, without stopping the engine; after `close` the last ones."""
        return snapshot(self._core, uptime_seconds=time.monotonic() - self._started, health=self.health)

    def close(self) -> None:
        """End all requests with `EngineClosed` and free the model's memory before returning. Harmless when repeated.

        Where a step hangs, this returns as soon as the step is overdue (`EngineOptions.step_timeout_s`), with a `RuntimeWarning`.
        """
        if self._finalizer.detach():
            self._loop.close()
        else:
            self._loop.wait_closed()                     # another thread may have begun it

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------------ internals

    @cached_property
    def _template(self) -> ChatTemplate:
        # Made when the first chat asks for it: a model without one, or with a broken one, can still continue raw prompts.
        bos, eos = self.vocab.bos_id, self.vocab.eos_id
        return ChatTemplate(
            self._chat_template_source,
            bos_text=self.vocab.token_text(bos) if bos is not None else "",
            eos_text=self.vocab.token_text(eos) if eos is not None else "",
        )

    def _encode(self, messages: Iterable[Mapping[str, Any]], /, **variables: Any) -> list[int]:
        return encode_chat(self.vocab, self._template, messages, **variables)

    def _checked(self, prompt: Iterable[int]) -> list[int]:
        tokens = [int(token) for token in prompt]
        bad = next((token for token in tokens if not 0 <= token < self.info.n_vocab), None)
        if bad is not None:
            raise BadRequest(f"Token id {bad} is outside the vocabulary of {self.info.n_vocab:,}.")
        return tokens

    def _options_of(self, fields: dict[str, Any]) -> RequestOptions:
        """Those of ``fields`` that are not about sampling; they are taken out. Refuses what the loaded model cannot do."""
        options = RequestOptions(**{name: fields.pop(name) for name in RequestOptions.__dataclass_fields__ if name in fields})
        if options.context_policy == "shift" and not self.info.can_shift:
            raise UnsupportedParameter("This model's memory cannot shift; use the context policy truncate_middle or error.")
        if options.adapter is not None and options.adapter not in self.info.adapters:
            known = f"known are {', '.join(self.info.adapters)}" if self.info.adapters else "none was given at load (--lora)"
            raise UnsupportedParameter(f"There is no adapter {options.adapter!r}; {known}.")
        return options

    def _submit(self, fit: Fit, params: SamplingParams, options: RequestOptions) -> Stream:
        if not self.info.can_generate:
            raise UnsupportedParameter(f"{self.info.model} is an encoder, which embeds texts and writes none; load another model to answer with.")
        tokens = fit.tokens
        if not tokens:
            raise BadRequest("The prompt is empty; give at least one character.")
        bad = next((token for token in params.logit_bias if not 0 <= token < self.info.n_vocab), None)
        if bad is not None:
            raise BadRequest(f"logit_bias names token {bad}, outside the vocabulary of {self.info.n_vocab:,}.")
        params = replace(params, max_tokens=answer_limit(params.max_tokens, self.info.n_ctx, options.context_policy))
        stream = Stream()
        # The engine must not keep a stream alive that nobody reads: dropping it is one way to cancel.
        reader = weakref.ref(stream)

        def emit(event: Event) -> None:
            target = reader()
            if target is not None:
                target._put(event)
            else:                                        # also where the stream never reached its reader
                cancel()

        sequence = Sequence(
            tokens, params, sampler=Sampler(params, n_vocab=self.info.n_vocab, prompt=tokens), detokenizer=Detokenizer(self.vocab, options.shown),
            emit=emit, options=options, constraint=checked(options.constraint, self.info.n_vocab), keep=fit.keep, dropped=fit.dropped,
        )
        core, loop = self._core, self._loop
        inside = weakref.ref(sequence)                   # the sequence knows `emit`, and that knows this

        def cancel() -> None:
            sequence = inside()
            if sequence is None:
                return
            try:
                loop.post(partial(core.cancel, sequence))
            except EdgeInferError:                       # closed, or a step is overdue: it has ended or soon will
                return
            if sequence.status is Status.RUNNING and not sequence.is_decoding:
                core.backend.abort()                     # a prompt is being read: do not wait for the end of the chunk

        loop.submit(sequence, max_waiting=self._options.max_waiting)
        stream._bind(sequence, cancel, self)
        return stream


def _template_variables(tools: list[Any] | None, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    variables = dict(template_kwargs or {})
    bad = next((name for name in variables if not (isinstance(name, str) and name.isidentifier())), None)
    if bad is not None:
        raise BadRequest(f"A template option must be named by an identifier, not {bad!r}.")
    if "tools" in variables:
        raise BadRequest("'tools' is a field of the request and cannot be a template option.")
    if tools:
        variables["tools"] = list(tools)
    return variables
