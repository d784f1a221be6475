"""Prefixes are read once: by whom, who waits for it, and what can be reused of which memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_runs import SYSTEM, Run, start

from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.sequence import Status
from edgeinfer.runtime.values import StepPlan, StepResult

# ----------------------------------------------------------------------------------------------- prefixes that are being read


def decoded(run: Run) -> int:
    return sum(len(chunk.tokens) for plan in run.backend.plans for chunk in plan.decodes)


@pytest.mark.parametrize("count", [2, 5, 8])
def test_requests_that_arrive_together_read_their_prefix_once(count: int) -> None:
    run = start()
    for number in range(count):
        run.add(f"r{number}-", f"{SYSTEM} {number} is my number.", max_tokens=2)
    tail = len(" 0 is my number.")
    plans = run.finish()
    assert plans[:3] == ["| r0-16", "| r0-16", "| r0-16"]      # the others wait ...
    # ... and compute their own tails; a space is shared, too.
    assert run.backend.tokens_computed - decoded(run) == len(SYSTEM) + 1 + count * (tail - 1)
    assert [run[f"r{number}-"].cached for number in range(count)] == [0] + [len(SYSTEM) + 1] * (count - 1)
    assert all(seq.text == "zz" for seq in run.sequences.values())


def test_equal_prompts_that_arrive_together_are_read_once() -> None:
    run = start()
    for number in range(4):
        run.add(f"r{number}-", SYSTEM, max_tokens=1)
    run.finish()
    assert run.backend.tokens_computed == len(SYSTEM) + 3      # and the last token of each, which gives the logits


def test_those_who_share_nothing_do_not_wait() -> None:
    run = start()
    run.add("leader", SYSTEM, max_tokens=1)
    run.add("follower", SYSTEM + "!", max_tokens=1)
    run.add("other", "x" * 10, max_tokens=1)
    assert run.step() == "| other10 leader6"


def test_a_prefix_that_is_quickly_computed_is_not_waited_for() -> None:
    run = start()
    run.add("a", "1234567aaaaaaaaaaaaaa", max_tokens=1)
    run.add("b", "1234567bbbbbbbbbbbbbb", max_tokens=1)
    assert run.step() == "| a16" and run.core.scheduler.running == [run["a"], run["b"]]


def waiting_for_a_leader(**fields) -> Run:
    run = start(**fields)
    for name in ("lead", "next", "last"):
        run.add(name, f"{SYSTEM}({name})", max_tokens=1)
    assert run.steps(2) == ["| lead16", "| lead16"]
    assert run["next"].status is run["last"].status is Status.WAITING
    return run


def test_followers_survive_the_cancellation_of_their_leader() -> None:
    run = waiting_for_a_leader()
    run.core.cancel(run["lead"])
    # What it had read is not lost, and one of them reads the rest for both.
    assert run.finish() == ["| next16", "| next1 last5"]
    assert [run[name].text for name in ("lead", "next", "last")] == ["", "z", "z"]


def test_followers_survive_the_failure_of_their_leader() -> None:
    run = waiting_for_a_leader()
    forward = run.backend.forward
    run.backend.forward = lambda plan: StepResult({}, failed={chunk.slot: "broken" for chunk in plan.chunks})
    assert run.step() == "| lead16" and run["lead"].status is Status.FAILED
    run.backend.forward = forward
    # What a failed step left behind is not to be trusted, so they begin afresh, and together.
    assert run.finish() == ["| next16", "| next16", "| next16", "| next1 last5"]
    assert run["next"].text == run["last"].text == "z" and run["next"].cached == 0 and run["last"].cached == len(SYSTEM) + 1


def test_followers_survive_the_preemption_of_their_leader() -> None:
    run = start(kv_cells=90, n_ctx=90)
    run.add("old", "o" * 10, max_tokens=60)
    run.step()
    for name in ("leader", "f1", "f2"):
        run.add(name, f"{SYSTEM}{name}", max_tokens=40)
    run.finish()
    assert run["leader"].preemptions + run["f1"].preemptions + run["f2"].preemptions > 0
    assert {name: len(seq.text) for name, seq in run.sequences.items()} == {"old": 60, "leader": 40, "f1": 40, "f2": 40}


def test_a_follower_gives_up_on_a_leader_that_does_not_get_on() -> None:
    run = start(prefill_chunk=100)
    leader = run.add("leader", SYSTEM + "leader", max_tokens=1)
    forward = run.backend.forward

    def stuck(plan: StepPlan) -> StepResult:
        mine = [chunk for chunk in plan.chunks if chunk.slot == leader.slot]
        done = forward(StepPlan(plan.decodes, tuple(chunk for chunk in plan.prefills if chunk not in mine)))
        return done._replace(aborted=done.aborted + tuple(chunk.slot for chunk in mine))

    run.backend.forward = stuck
    run.step()
    follower = run.add("follower", SYSTEM + "follower", max_tokens=1)
    bound = 8 * len(SYSTEM) + 2 * 100                        # tokens of other work
    said = run.finish_one(follower)
    assert said == ["| leader49"] * -(-bound // 49) + ["| leader49 follower51"]
    assert follower.text == "z" and leader.end is None
    run.backend.forward = forward
    run.finish()
    assert leader.text == "z"


def test_a_leader_is_as_urgent_as_who_waits_for_it() -> None:
    run = start(max_num_seqs=4)
    run.add("batch", SYSTEM + " batch", max_tokens=1, priority="batch")
    assert run.step() == "| batch16"
    run.add("long", "l" * 100, max_tokens=1)
    assert run.step() == "| long16"
    run.add("chat", SYSTEM + " hello", max_tokens=1)
    assert run.steps(4) == ["| batch16", "| batch16", "| batch1 chat5 long10", "| long16"]


def test_waiting_for_a_leader_never_makes_it_less_urgent() -> None:
    run = start(n_ctx=200, kv_cells=200)
    leader = run.add("leader", SYSTEM + "leader", max_tokens=1)
    run.step()
    due = leader.due
    # One that was preempted is more urgent by that alone, however late it is due.
    late = run.add("late", SYSTEM + "x" * 100, max_tokens=1)
    late.status = Status.PREEMPTED
    assert late.due > due
    run.step()
    assert late.leader is leader and leader.due == due


def test_adapters_never_share_kv() -> None:
    run = start(adapters=("x", "y"))
    for name, adapter in (("base", None), ("x", "x"), ("y", "y"), ("x2", "x")):
        run.add(name, SYSTEM, max_tokens=1, adapter=adapter)
    run.finish()
    assert [run[name].cached for name in ("base", "x", "y", "x2")] == [0, 0, 0, len(SYSTEM) - 1]
    again = run.add("again", SYSTEM, max_tokens=1)
    run.finish()
    assert again.cached == len(SYSTEM) - 1 and run["y"].cache_miss is not None


def test_an_adapter_that_has_nothing_cached_says_so() -> None:
    run = start(adapters=("x",))
    for name, adapter in (("base", None), ("x", "x"), ("x2", "x")):
        run.add(name, SYSTEM, max_tokens=1, adapter=adapter)
        run.finish()
    assert [run[name].cache_miss for name in ("base", "x", "x2")] == ["nothing is cached yet", "nothing is cached yet for the adapter x", None]


# ----------------------------------------------------------------------------------------------- memory that cannot do it all


class Windowed(ScriptedBackend):
    """Remembers the newest ``window`` tokens of a slot only, like a model with sliding-window attention whose cache is that small."""

    window = 32

    def reusable(self, slot: int, length: int, wanted: int) -> int:
        # To go on after `wanted` tokens, the window before that place must still be there.
        return wanted if length <= self.window or wanted == length else 0


@pytest.mark.parametrize(("first", "then", "cached", "miss"), [
    ("a" * 90, "a" * 20 + "b", 0, "the sliding window has moved past the 20 shared tokens"),              # case 57: prompts that diverge early
    ("a" * 90, "a" * 15, 0, "the sliding window has moved past the 14 shared tokens"),                    # case 58: the beginning of a long one
    ("a" * 30, "a" * 15, 14, None),                                                                       # still all there
    ("a" * 90, "a" * 90 + "z" + "b" * 9, 91, "the cached conversation differs from token 91 on"),         # going on where it ended
])
def test_a_window_that_has_moved_on_is_read_afresh(first: str, then: str, cached: int, miss: str | None) -> None:
    run = start(backend=Windowed)
    run.add("first", first, max_tokens=2)
    run.finish()
    before = run.backend.tokens_computed
    seq = run.add("then", then, max_tokens=1)
    run.finish()
    assert seq.text == "z" and seq.cached == cached
    assert run.backend.tokens_computed - before == len(then) - cached
    if cached == 0 or miss is None:
        assert seq.cache_miss == miss


def test_a_shorter_prefix_that_is_still_there_beats_a_longer_one_that_the_window_has_left() -> None:
    run = start(backend=Windowed)
    run.add("long", SYSTEM + "a" * 60, max_tokens=1)
    run.finish()
    run.add("short", SYSTEM[:30], max_tokens=1)
    run.finish()
    seq = run.add("then", SYSTEM + "b", max_tokens=1)
    run.finish()
    assert seq.cached == 30


class CannotCopy(ScriptedBackend):
    """Keeps one state a slot, like a recurrent model: nothing can be copied out of it."""

    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self.info = replace(self.info, can_copy_prefix=False)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        raise AssertionError("nothing can be copied here")


def test_nobody_waits_for_a_prefix_that_could_not_be_copied() -> None:
    run = start(backend=CannotCopy)
    for name in "ab":
        run.add(name, SYSTEM + name, max_tokens=2)
    run.step()
    assert run["a"].status is run["b"].status is Status.RUNNING
    run.finish()
    assert [run[name].text for name in "ab"] == ["zz", "zz"]


def test_where_nothing_can_be_copied_an_idle_conversation_beats_a_longer_running_one() -> None:
    run = start(backend=CannotCopy)
    run.add("idle", SYSTEM[:30], max_tokens=1)
    run.finish()
    run.add("running", "x", max_tokens=50)
    run.add("other", SYSTEM + "x" * 5, max_tokens=50)          # takes the idle one over
    run.step()
    run.add("new", SYSTEM[:25] + "!", max_tokens=1)
    run.finish()
    assert run["other"].cached == 30 and all(seq.end for seq in run.sequences.values())
