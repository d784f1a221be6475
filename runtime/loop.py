"""The engine's thread: it owns `EngineCore` and every native handle. Everyone else leaves notes in its inbox."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial

from edgeinfer.errors import BackendFailed, EdgeInferError, EngineBusy, EngineClosed
from edgeinfer.runtime.engine import EngineCore
from edgeinfer.runtime.health import EngineOptions, Health, Watchdog
from edgeinfer.runtime.sequence import Sequence
from edgeinfer.runtime.values import Failed

_LAST_S = 1.0                            # how long close() waits for an overdue step
_STALLS = 2                              # steps in a row that had to be stopped before what they were computing fails


class EngineLoop:
    """Runs the core's steps, one after the other, while there is work.

    It must not know `Engine`: an engine that its owner forgets is collected, and collecting it stops this thread.
    """

    def __init__(self, core: EngineCore, options: EngineOptions):
        self._core = core
        self._options = options
        self._inbox: deque[Callable[[], None]] = deque()
        # Reentrant: the garbage collector may drop a stream, and so cancel, in the middle of anything.
        self._wake = threading.Condition(threading.RLock())
        self._closing = False
        self._ended = False
        self._failure: EdgeInferError | None = None      # why the engine cannot go on
        self._stalls = 0
        self._told: list[Callable[[EdgeInferError], None]] = []
        self._watch = Watchdog(options.step_timeout_s, stalled=core.backend.abort, overdue=self._give_up)
        self._thread = threading.Thread(target=self._run, name="edgeinfer-engine", daemon=True)
        self._watch.start()
        try:
            self._thread.start()
        except BaseException:
            self._watch.stop()
            raise

    # ---------------------------------------------------------------------------------------------------- from any thread

    def submit(self, seq: Sequence, *, max_waiting: int) -> None:
        """Hand a request over, and count it. Raises `EngineBusy` when ``max_waiting`` are inside, and what `post` raises."""
        counters = self._core.counters
        with self._wake:
            inside = counters.inside
            if inside >= max_waiting:
                self._check_open()
                raise EngineBusy(f"{inside} requests are already queued or running; try again later.")
            self.post(partial(self._core.submit, seq))
            counters.submitted += 1
            self._core.inside.add(seq)

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the owner thread before its next step. Raises `EngineClosed`, or `BackendFailed` while a step is overdue."""
        with self._wake:
            self._check_open()
            self._inbox.append(action)
            self._wake.notify_all()

    def on_failure(self, tell: Callable[[EdgeInferError], None]) -> None:
        """``tell`` hears of every error that ends all that is being computed, for those who wait for something else than a sequence.

        It is called on the engine's thread or on the watchdog's, once the loop has ended too.
        """
        self._told.append(tell)

    def close(self) -> None:
        """End every request, free the backend, and wait until it is freed, or until the watchdog finds that this may never happen."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._core.backend.abort()
        self.wait_closed()

    def wait_closed(self) -> None:
        """Wait for the end of a closing that has begun."""
        if threading.current_thread() in (self._thread, self._watch.thread):
            return                                       # the engine was dropped while delivering the last event to its last stream
        with self._wake:
            self._wake.wait_for(lambda: self._ended or self._core.overdue is not None)
            ended = self._wake.wait_for(lambda: self._ended, _LAST_S)
        if ended:
            self._thread.join()
            if self._watch.thread is not None:
                self._watch.thread.join()
        else:
            warnings.warn(f"{self._core.overdue} Its thread and its memory are freed when it does.", RuntimeWarning, stacklevel=2)

    def health(self) -> Health:
        """Computed from a few attributes: cheap."""
        began = self._watch.began
        seconds = time.perf_counter() - began if began else 0.0
        overdue = self._core.overdue
        if self._failure is not None:
            return Health("failed", str(self._failure), seconds)
        if self._closing:
            return Health("closed", str(overdue) if overdue is not None else "The engine is closed.", seconds)
        if overdue is not None:
            return Health("stalled", str(overdue), seconds)
        if self._watch.is_stalled:
            return Health("stalled", f"A step has been running for {seconds:.1f} s.", seconds)
        return Health("ok", "", seconds)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise BackendFailed(str(self._failure))
        if self._closing:
            raise EngineClosed("The engine is closed.")
        if self._core.overdue is not None:
            raise BackendFailed(str(self._core.overdue))

    # ------------------------------------------------------------------------------------------------ the watchdog's thread

    def _give_up(self, step: float) -> None:
        """A step does not end and does not heed abort(): tell everybody who waits for it. The engine's thread is inside it and cannot."""
        core = self._core
        with self._wake:
            if self._watch.began != step:                # it has ended just now
                return
            seconds = time.perf_counter() - step
            error = BackendFailed(
                f"{core.backend.info.model}: the backend has not finished a step for {seconds:.1f} s (step_timeout_s is {self._options.step_timeout_s:g}); "
                "until it does no request can run: close the engine and load the model again."
            )
            core.overdue = error
            self._wake.notify_all()
        # Only their readers are told. The sequences belong to the engine's thread, which ends and counts them if it ever comes back.
        for seq in list(core.inside):
            seq.emit(Failed(error, seq.usage(), seq.timings()))
        self._tell(error)

    def _tell(self, error: EdgeInferError) -> None:
        for tell in self._told:
            tell(error)

    # ------------------------------------------------------------------------------------------------- the engine's thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            error = EngineClosed("The engine was closed while the request was running.")
            self._core.abandon(error)
            self._watch.stop()
            with self._wake:
                self._watch.began = 0.0
                self._core.overdue = None
                self._closing = self._ended = True
                self._wake.notify_all()
            self._tell(error)                            # now that nobody can add to the inbox any more
            self._told.clear()                           # those who listen know the loop: nothing is left to wait for the garbage collector

    def _turn(self) -> bool:
        """Read the inbox, make one step. False when it was the last."""
        core = self._core
        with self._wake:
            self._watch.began = 0.0
            idle = not self._has_work()
        if idle:
            core.backend.rest()
        with self._wake:
            while not self._has_work():
                self._wake.wait()
            if idle and core.options.batch_wait_ms:
                self._wake.wait_for(lambda: self._closing, core.options.batch_wait_ms / 1e3)
            began = self._watch.began = time.perf_counter()
            actions = []
            while self._inbox:                           # one by one: a collected stream may add to it at any time
                actions.append(self._inbox.popleft())
            closing = self._closing
        for action in actions:
            self._guard(action)
        if closing:
            core.close()
            return False
        if core.overdue is None:
            self._guard(core.step)
        if core.overdue is not None:
            self._recover()
        elif self._watch.stalled == began:
            self._after_stall()
        else:
            self._stalls = 0
        return True

    def _has_work(self) -> bool:
        return bool(self._inbox or self._closing or self._core.has_work or self._core.overdue)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
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
            failure = BackendFailed(f"The engine failed and cannot go on: {error} ({again})")
            with self._wake:
                self._failure, self._closing = failure, True
            self._core.abandon(failure)

    def _recover(self) -> None:
        """An overdue step has ended after all. Its requests were told that they failed; who comes from now on is served again."""
        core = self._core
        overdue = core.overdue
        assert overdue is not None
        # What was left in the inbox before everybody was told is in the core by now or comes with this.
        with self._wake:
            actions, self._inbox = list(self._inbox), deque()
        for action in actions:
            self._guard(action)
        self._guard(partial(core.fail_all, overdue))
        with self._wake:
            self._watch.began = 0.0
            core.overdue = None

    def _after_stall(self) -> None:
        """A step ran too long and heeded abort(), or ended by itself: slow, not dead. It is tried again, but not for ever."""
        self._stalls += 1
        if self._stalls >= _STALLS:
            self._stalls = 0
            error = BackendFailed(
                f"Steps take longer than {self._options.step_timeout_s:g} s; load the model with a smaller prefill_chunk or a larger step_timeout_s."
            )
            self._guard(partial(self._core.fail_running, error))
            self._tell(error)
