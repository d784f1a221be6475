"""Texts to vectors, on the engine's thread, between the steps of the answers that run.

One piece of one input a turn of the loop, whoever waits: a running answer is held up by no more than a piece, and inputs of several callers take
turns. Nothing is computed together, so what a vector is depends on its input alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence as Seq
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from edgeinfer.errors import BackendFailed, BadRequest, ContextLengthExceeded, EdgeInferError, EngineBusy, UnsupportedParameter
from edgeinfer.runtime.backend import Backend, Vocab
from edgeinfer.runtime.chat_format import with_bos
from edgeinfer.runtime.loop import EngineLoop
from edgeinfer.runtime.values import BackendInfo


@dataclass(frozen=True)
class Embeddings:
    """``vectors``: one an input, in order: float32 of shape (n_embd,), of length 1, so that a dot product is the cosine similarity."""

    vectors: list[np.ndarray]
    prompt_tokens: int                   # of all inputs, special tokens included


def embedding_tokens(vocab: Vocab, info: BackendInfo, inputs: Iterable[str | Seq[int]]) -> list[list[int]]:
    """Token ids of every input: texts with the special tokens that the model wants around them (BOS, EOS, [CLS]), ids as they are.

    Checks all of them before anything is computed. Raises `BadRequest`, `ContextLengthExceeded`, or `UnsupportedParameter` where the model gives none.
    """
    if not info.can_embed:
        raise UnsupportedParameter(f"{info.model} gives no embeddings; load another model for them.")
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Iterable):
        raise BadRequest("Inputs to embed come as a list: of texts, or of lists of token ids.")
    tokens = [_tokens_of(vocab, info, item, f"Input {index}") for index, item in enumerate(inputs)]
    if not tokens:
        raise BadRequest("There is nothing to embed; give at least one input.")
    for index, item in enumerate(tokens):
        if len(item) > info.n_ctx:
            way_out = f"It is input {index} of {len(tokens)} to embed; split it or load the model with a larger --ctx-size."
            raise ContextLengthExceeded(len(item), info.n_ctx, way_out)
    return tokens


def _tokens_of(vocab: Vocab, info: BackendInfo, item: Any, name: str) -> list[int]:
    if isinstance(item, str):
        tokens = with_bos(vocab, vocab.encode(item, add_special=True, parse_special=True)) if item else []
    elif isinstance(item, Seq) and not isinstance(item, bytes) and all(isinstance(token, int) and not isinstance(token, bool) for token in item):
        tokens = list(item)
        bad = next((token for token in tokens if not 0 <= token < info.n_vocab), None)
        if bad is not None:
            raise BadRequest(f"{name} to embed has token id {bad}, outside the vocabulary of {info.n_vocab:,}.")
    else:
        raise BadRequest(f"{name} to embed must be a text or a list of token ids, not {type(item).__name__}.")
    if not tokens:
        raise BadRequest(f"{name} to embed is empty; give at least one character.")
    return tokens


def unit(vector: np.ndarray) -> np.ndarray:
    """The vector of length 1 in its direction. Raises `BackendFailed` where it has none."""
    length = float(np.linalg.norm(vector))
    if not (np.isfinite(length) and length > 0):
        raise BackendFailed("The model's embedding holds values that are no numbers, or only zeros.")
    return (vector / length).astype(np.float32)


class _Job:
    """The inputs of one caller, embedded so far."""

    def __init__(self, inputs: list[list[int]]):
        self.future: Future[Embeddings] = Future()
        self._inputs = inputs
        self._vectors: list[np.ndarray] = []
        self._running: Generator[None, None, np.ndarray] | None = None

    @property
    def between(self) -> bool:
        """No input is half done: others may have the backend."""
        return self._running is None

    def advance(self, backend: Backend) -> None:
        """Compute one piece. What goes wrong becomes the future's exception."""
        try:
            if self._running is None:
                self._running = backend.embed(self._inputs[len(self._vectors)])
            try:
                next(self._running)
            except StopIteration as end:
                self._running = None
                self._add(end.value)
        except EdgeInferError as error:
            self.fail(error)
        except Exception as error:       # of the native library, or ours: this caller's alone
            self.fail(BackendFailed(f"Embedding failed: {type(error).__name__}: {error}."))

    def _add(self, vector: np.ndarray) -> None:
        self._vectors.append(unit(vector))
        if len(self._vectors) == len(self._inputs):
            with suppress(InvalidStateError):            # its caller has cancelled it
                self.future.set_result(Embeddings(self._vectors, sum(map(len, self._inputs))))

    def fail(self, error: EdgeInferError) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class Embedder:
    """Whose turn it is. Callers submit from any thread; the engine's thread computes."""

    def __init__(self, backend: Backend, loop: EngineLoop, *, max_waiting: int):
        self._backend = backend
        self._loop = loop
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._round = 0                  # counts failures of the engine: a turn that was posted before one does nothing
        self._posted = False             # a turn of this round lies in the loop's inbox, or runs
        loop.on_failure(self.fail_all)

    def submit(self, inputs: list[list[int]]) -> Future[Embeddings]:
        """Queue inputs that `embedding_tokens` gave; cancel the future to take them out.

        Raises `EngineBusy` when ``max_waiting`` callers wait already, and what `EngineLoop.post` raises.
        """
        job = _Job(inputs)
        with self._lock:
            if len(self._jobs) >= self._max_waiting:
                raise EngineBusy(f"{len(self._jobs)} requests for embeddings are already queued; try again later.")
            if not self._posted:
                self._post()
            self._jobs.append(job)
        return job.future

    def fail_all(self, error: EdgeInferError) -> None:
        """Everybody who waits gets ``error``. From any thread; a piece that runs is not interrupted, and its result is thrown away."""
        with self._lock:
            jobs, self._jobs = self._jobs, deque()
            self._round += 1
            self._posted = False
        for job in jobs:
            job.fail(error)

    def _post(self) -> None:
        self._loop.post(partial(self._turn, self._round))
        self._posted = True

    def _turn(self, number: int) -> None:
        """On the engine's thread: one piece of the first job."""
        with self._lock:
            if number != self._round:
                return
            while self._jobs and self._jobs[0].future.done():
                self._jobs.popleft()
            self._posted = False
            if not self._jobs:
                return
            job = self._jobs[0]
            try:
                self._post()                             # before computing: an engine that closes says so here
                refusal = None
            except EdgeInferError as error:
                refusal = error
        if refusal is not None:
            self.fail_all(refusal)
            return
        job.advance(self._backend)
        if job.between:
            with self._lock:
                if self._jobs and self._jobs[0] is job:
                    self._jobs.rotate(-1)
