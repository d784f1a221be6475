"""The engine as other programs meet it: thread-safe, streaming, closable."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import BackendFailed, BadRequest, EdgeInferError, EngineBusy, EngineClosed, UnsupportedParameter
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.runtime.backend import Backend
from edgeinfer.runtime.chat_format import encode_chat, encode_prompt
from edgeinfer.runtime.context_policy import Fit, answer_limit, fit_chat, fit_prompt
from edgeinfer.runtime.detokenizer import Detokenizer
from edgeinfer.runtime.engine import EngineCore, EngineCounters
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.sequence import Sequence, Status
from edgeinfer.runtime.stream import Stream
from edgeinfer.runtime.values import BackendInfo, Event, RequestOptions, SamplingParams

if TYPE_CHECKING:
    from edgeinfer.runtime.kv_spill import KVPersistence
    from edgeinfer.runtime.speculative import Speculator


class _Loop:
    """The one thread that owns the core and its native handles. Everyone else only leaves notes in its inbox.

    It must not know `Engine`: an engine that its owner forgets is collected, and collecting it stops this thread.
    """

    def __init__(self, core: EngineCore):
        self._core = core
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="edgeinfer-engine", daemon=True)
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the owner thread before its next step."""
        with self._wake:
            if self._closing:
                raise EngineClosed("The engine is closed.")
            self._inbox.append(action)
            self._wake.notify()

    def close(self) -> None:
        """End every request, free the backend, and wait until it is freed."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._core.backend.abort()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        core = self._core
        while True:
            with self._wake:
                idle = not (self._inbox or self._closing or core.has_work)
            if idle:
                core.backend.rest()
            with self._wake:
                while not (self._inbox or self._closing or core.has_work):
                    self._wake.wait()
                if idle and core.options.batch_wait_ms:
                    self._wake.wait_for(lambda: self._closing, core.options.batch_wait_ms / 1e3)
                actions = list(self._inbox)
                self._inbox.clear()
                closing = self._closing
            for action in actions:
                action()
            if closing:
                core.close()
                return
            try:
                core.step()
            except Exception as error:
                self._survive(error)

    def _survive(self, error: Exception) -> None:
        """A fault of the native library, or of ours: nobody may wait for ever because of it, and the next request deserves a try."""
        if not isinstance(error, EdgeInferError):
            error = BackendFailed(f"The engine's step failed: {type(error).__name__}: {error}.")
        try:
            self._core.fail_all(error)
        except Exception as again:
            # Not even the clean-up works: the engine is over, and says so to those inside and to those who come.
            with self._wake:
                self._closing = True
            self._core.abandon(BackendFailed(f"The engine failed and cannot go on: {error} ({again})"))


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
    ):
        self.info: BackendInfo = backend.info
        self.vocab = backend.vocab
        self._options = options
        self._persistence = persistence
        self._chat_template_source = chat_template or backend.vocab.chat_template
        self._submitting = threading.Lock()
        core = EngineCore(backend, options, speculator, persistence)
        self.counters: EngineCounters = core.counters
        self._core = core
        self._loop = _Loop(core)
        # At interpreter exit too: a native compute must not be running while the process is taken apart.
        self._finalizer = weakref.finalize(self, self._loop.close)

    # ------------------------------------------------------------------------------------------------------------- requests

    def chat(self, messages: Iterable[Mapping[str, Any]], params: SamplingParams | None = None, **fields: Any) -> Stream:
        """Answer a conversation: ``[{"role": "user", "content": "..."}]``, rendered with the model's own chat template.

        ``fields`` are those of `SamplingParams`, over ``params``, over the defaults, and those of `RequestOptions` (priority, context_policy, ...).
        Raises `BadRequest` and its kin at once.
        """
        options = self._options_of(fields)
        params = SamplingParams.of(params, **fields)
        return self._submit(fit_chat(self._encode, messages, self.info.n_ctx, options.context_policy, params.max_tokens), params, options)

    def generate(self, prompt: str | Iterable[int], params: SamplingParams | None = None, **fields: Any) -> Stream:
        """Continue a raw prompt: text (markers in it are honoured) or token ids taken as they are. ``fields`` as for `chat`."""
        options = self._options_of(fields)
        params = SamplingParams.of(params, **fields)
        tokens = encode_prompt(self.vocab, prompt) if isinstance(prompt, str) else self._checked(prompt)
        return self._submit(fit_prompt(tokens, 0, self.info.n_ctx, options.context_policy, params.max_tokens), params, options)

    def count_tokens(self, messages: Iterable[Mapping[str, Any]]) -> int:
        """Prompt tokens that `chat` would send for these messages, were there room for all of them."""
        return len(self._encode(messages))

    @property
    def notices(self) -> tuple[str, ...]:
        """What is done differently than was asked for at load, and what went wrong without hurting a request; one sentence each."""
        return self.info.notices + (self._persistence.notices if self._persistence is not None else ())

    # ------------------------------------------------------------------------------------------------------------- lifetime

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """End all requests with `EngineClosed` and free the model's memory before returning. Harmless when repeated."""
        self._finalizer()

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

    def _encode(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        return encode_chat(self.vocab, self._template, messages)

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

        sequence = Sequence(
            tokens, params, sampler=Sampler(params, n_vocab=self.info.n_vocab, prompt=tokens), detokenizer=Detokenizer(self.vocab), emit=emit,
            options=options, keep=fit.keep, dropped=fit.dropped,
        )
        core, loop = self._core, self._loop

        def cancel() -> None:
            try:
                loop.post(lambda: core.cancel(sequence))
            except EngineClosed:                         # closing ends it anyway
                return
            if sequence.status is Status.RUNNING and not sequence.is_decoding:
                core.backend.abort()                     # a prompt is being read: do not wait for the end of the chunk

        with self._submitting:
            inside = self.counters.inside
            if inside >= self._options.max_waiting:
                raise EngineBusy(f"{inside} requests are already queued or running; try again later.")
            loop.post(lambda: core.submit(sequence))
            self.counters.submitted += 1
        stream._bind(sequence, cancel, self)
        return stream
