"""A full context, from request to report: on the scripted backend, and on llama.cpp with the demo model."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from edgeinfer.errors import BadRequest, ContextLengthExceeded, UnsupportedParameter
from edgeinfer.runtime.backends.fake import END, ScriptedBackend
from edgeinfer.runtime.context_policy import SINKS, least_freed
from edgeinfer.runtime.load import load
from edgeinfer.runtime.scheduler import SchedulerOptions
from edgeinfer.runtime.service import Engine
from edgeinfer.runtime.values import FinishReason

ALPHABET = b"abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines made in a test, closed after it."""
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def start(engines: list[Engine], backend: ScriptedBackend, **options: int) -> Engine:
    engines.append(Engine(backend, options=SchedulerOptions(**options)))
    return engines[-1]


def counting(tokens: list[int]) -> int:
    """a, b, c, ... from wherever the newest token stands: an answer without end that shows every gap."""
    return ALPHABET[(ALPHABET.index(tokens[-1]) + 1) % 26] if tokens[-1] in ALPHABET else ALPHABET[0]


def letters(count: int) -> str:
    return "".join(chr(ALPHABET[at % 26]) for at in range(count))


def tells_the_secret(tokens: list[int]) -> int:
    """Answers with the word after "secret is" wherever the context still has it, else with "gone"."""
    data = bytes(token for token in tokens if token < 256)
    said = data.rpartition(b"assistant\n")[2]
    _, found, after = data.partition(b"secret is ")
    answer = after.split(b".")[0] if found else b"gone"
    return answer[len(said)] if len(said) < len(answer) else END


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns] if system else turns


# ----------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("policy", ["shift", "truncate_middle"])
def test_the_secret_word(engines, policy) -> None:
    # case 69: secret word at the start, filler past n_ctx, asked for at the end
    engine = start(engines, ScriptedBackend(tells_the_secret, n_ctx=400))
    filler = ["some filler " * 8] * 6
    told = chat(*filler, "What is the word?", system="The secret is XYZZY.")
    with pytest.raises(ContextLengthExceeded) as caught:
        engine.chat(told)
    assert (caught.value.needed, caught.value.available) == (engine.count_tokens(told), 400)

    stream = engine.chat(told, context_policy=policy)
    assert stream.text() == "XYZZY"
    assert stream.usage.dropped_tokens > 0
    assert stream.usage.prompt_tokens + stream.usage.dropped_tokens == engine.count_tokens(told)

    # Told by the user, it is part of what may go: never silently.
    stream = engine.chat(chat("The secret is XYZZY.", *filler[1:], "What is the word?"), context_policy="shift")
    assert stream.text() == "gone" and stream.usage.dropped_tokens > 0


@pytest.mark.parametrize("policy", ["error", "shift", "truncate_middle"])
def test_what_fits_is_not_touched_and_reports_nothing(engines, policy) -> None:
    stream = start(engines, ScriptedBackend([b"ok"])).chat(chat("hi", system="Be brief."), context_policy=policy)
    assert stream.text() == "ok" and stream.usage.dropped_tokens == 0 and stream.timings.shifts == 0


def test_a_raw_prompt_keeps_its_head_and_its_newest_tokens(engines) -> None:
    backend = ScriptedBackend([b"ok"], n_ctx=64)
    engine = start(engines, backend)
    text = "HEAD" + "m" * 200 + "TAIL"
    for policy, head in (("shift", "HEADmm"), ("truncate_middle", "HEAD" + "m" * 20)):
        before = len(backend.plans)
        stream = engine.generate(text, context_policy=policy)
        stream.text()
        read = bytes(token for plan in backend.plans[before:] for chunk in plan.prefills for token in chunk.tokens).decode()
        assert stream.usage.prompt_tokens + stream.usage.dropped_tokens == len(text)
        assert read.endswith("TAIL") and (stream.usage.cached_tokens or read.startswith(head))


@pytest.mark.parametrize("policy", ["shift", "truncate_middle"])
def test_a_system_message_as_long_as_the_context_is_refused(engines, policy) -> None:
    # case 70: nothing can be dropped
    engine = start(engines, ScriptedBackend(n_ctx=200))
    with pytest.raises(BadRequest, match="200.*--ctx-size"):
        engine.chat(chat("and a question that is over", system="s" * 180), context_policy=policy)
    assert engine.counters.submitted == 0 and engine.chat(chat("hi")).text() == "ok"


def test_a_model_that_cannot_shift_refuses_only_that(engines) -> None:
    backend = ScriptedBackend([b"ok"], n_ctx=64)
    backend.info = replace(backend.info, can_shift=False)
    engine = start(engines, backend)
    with pytest.raises(UnsupportedParameter, match="truncate_middle"):
        engine.generate("x", context_policy="shift")
    assert engine.generate("x" * 100, context_policy="truncate_middle").text() == "ok"


# ------------------------------------------------------------------------------------------------------------ running answers


@pytest.mark.parametrize("n_ctx", [128, 200])
@pytest.mark.parametrize("policy", ["error", "truncate_middle"])
def test_a_context_that_is_full_ends_the_answer_with_its_text(engines, n_ctx, policy) -> None:
    # case 72: n_ctx 200, short prompt, max_tokens 1024 (and n_ctx 128)
    stream = start(engines, ScriptedBackend(counting, n_ctx=n_ctx)).generate("prompt:", max_tokens=1024, context_policy=policy)
    assert stream.text() == letters(n_ctx + 1 - len("prompt:")) and stream.finish_reason is FinishReason.LENGTH
    assert stream.usage.dropped_tokens == 0


@pytest.mark.parametrize("n_ctx", [8, 33, 128, 200])
def test_shifting_goes_on_to_max_tokens_exactly(engines, n_ctx) -> None:
    # case 72
    stream = start(engines, ScriptedBackend(counting, n_ctx=n_ctx)).generate("prompt:", max_tokens=1024, context_policy="shift")
    assert stream.text() == letters(1024) and stream.finish_reason is FinishReason.LENGTH
    usage, timings = stream.usage, stream.timings
    assert usage.completion_tokens == 1024
    assert 0 < timings.shifts <= 1024 // least_freed(n_ctx) + 1
    # All that was there but what is still in the context was dropped and counted.
    assert n_ctx // 2 - SINKS <= usage.total_tokens - usage.dropped_tokens <= n_ctx + 1


def test_an_answer_without_max_tokens_ends_though_the_context_never_does(engines) -> None:
    # case 70 (shifts for ever), ollama#3583 of case 72
    stream = start(engines, ScriptedBackend(counting, n_ctx=128)).generate("prompt:", context_policy="shift")
    assert stream.text() == letters(128) and stream.finish_reason is FinishReason.LENGTH and stream.timings.shifts > 0


def test_a_head_near_the_context_ends_the_answer_instead_of_shifting_at_every_token(engines) -> None:
    # case 70: kept 4092 of 4096; here the prompt still fits
    engine = start(engines, ScriptedBackend(counting, n_ctx=200))
    asked = chat("?", system="s" * 110)
    free = 200 - engine.count_tokens(asked)
    assert free > 2 * least_freed(200)
    stream = engine.chat(asked, max_tokens=500, context_policy="shift")
    assert stream.text() == letters(500) and 0 < stream.timings.shifts <= 500 // least_freed(200)

    asked = chat("?", system="s" * 135)
    stream = engine.chat(asked, max_tokens=10, context_policy="shift")
    assert len(stream.text()) == 10 and stream.usage.dropped_tokens == 0 and stream.timings.shifts == 0


def test_the_system_turn_stays_across_shifts(engines) -> None:
    held: list[bytes] = []

    def script(tokens: list[int]) -> int:
        held.append(bytes(token for token in tokens if token < 256))
        return counting(tokens)

    stream = start(engines, ScriptedBackend(script, n_ctx=128)).chat(chat("go", system="Be a pirate."), max_tokens=600, context_policy="shift")
    assert stream.text() == letters(600) and stream.timings.shifts > 3
    assert all(data.startswith(b"system\nBe a pirate.") and len(data) <= 128 for data in held)


def test_after_a_shift_only_what_came_before_it_is_reused(engines) -> None:
    """What was computed in the sight of tokens that are gone is not what a fresh computation would give."""
    engine = start(engines, ScriptedBackend(counting, n_ctx=128, max_slots=1))
    first = engine.chat(chat("go", system="Be a pirate."), max_tokens=300, context_policy="shift")
    assert first.text() == letters(300) and first.timings.shifts > 0
    second = engine.chat(chat("go on", system="Be a pirate."), max_tokens=5)
    assert second.text() == letters(5)
    assert second.usage.cached_tokens == len("<system\nBe a pirate.>\n<user\n")       # each marker is one token


@pytest.mark.parametrize("running", [False, True])
def test_a_shift_moves_nothing_that_another_conversation_shares(engines, running) -> None:
    """The scripted backend refuses to move shared cells, as llama.cpp would corrupt the other one: the tokens left are computed again instead."""
    backend = ScriptedBackend(counting, n_ctx=128, max_slots=3)
    engine = start(engines, backend)
    prompt = "." * 100
    if running:
        streams = [engine.generate(prompt, max_tokens=200, context_policy="shift") for _ in range(3)]
    else:
        engine.generate(prompt, max_tokens=20).text()
        engine.generate(prompt + "!", max_tokens=20).text()
        streams = [engine.generate(prompt, max_tokens=200, context_policy="shift")]
    assert [stream.text() for stream in streams] == [letters(200)] * len(streams)
    assert streams[-1].usage.cached_tokens >= 99
    again = [chunk for plan in backend.plans for chunk in plan.prefills if chunk.start == SINKS]
    assert again                                                       # otherwise nothing was shared, and this shows nothing


def test_many_shift_at_once_under_pressure(engines) -> None:
    """Preempted, shifted and computed again: every answer is whole, and nobody's tokens are another's."""
    engine = start(engines, ScriptedBackend(counting, n_ctx=48, kv_cells=110, max_slots=4))
    answers: dict[int, str] = {}

    def one(index: int) -> None:
        answers[index] = engine.generate(f"{index:03}" + chr(ALPHABET[index]), max_tokens=150, context_policy="shift").text()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {index: letters(200)[index + 1 : index + 151] for index in range(12)}
    assert engine.counters.finished == 12 and engine.counters.shifts >= 36


@settings(max_examples=40, deadline=None)
@given(
    n_ctx=st.integers(8, 96), prompt=st.integers(1, 250), answer=st.integers(1, 300), policy=st.sampled_from(["error", "shift", "truncate_middle"]),
)
def test_any_prompt_and_answer(n_ctx, prompt, answer, policy) -> None:
    """The scripted backend refuses to hold more than n_ctx: whatever is asked for, the answer is whole as far as it goes, and all is accounted for."""
    with Engine(ScriptedBackend(counting, n_ctx=n_ctx)) as engine:
        try:
            stream = engine.generate("." * prompt, max_tokens=answer, context_policy=policy)
        except ContextLengthExceeded:
            assert policy == "error" and prompt > n_ctx
            return
        text = stream.text()
        usage = stream.usage
        assert text == letters(len(text)) and usage.completion_tokens == len(text)
        if policy == "shift":
            assert len(text) == answer
        else:
            assert usage.prompt_tokens + usage.dropped_tokens == prompt
            assert len(text) == min(answer, n_ctx + 1 - usage.prompt_tokens)
        assert prompt + len(text) - usage.dropped_tokens <= n_ctx + 1


# -------------------------------------------------------------------------------------------------------------- with llama.cpp


@pytest.fixture(scope="module")
def small(smollm2_gguf) -> Iterator[Engine]:
    with load(smollm2_gguf, ctx_size=256, parallel=2, kv_size=768) as engine:
        yield engine


STORY = "Write a long story about a fisherman and the sea."


def test_six_hundred_tokens_through_a_context_of_256(small) -> None:
    # case 72 (n_ctx 200, max_tokens 1024) and 70
    asked = chat(STORY, system="You tell stories.")
    stream = small.chat(asked, seed=3, repeat_penalty=1.2, repeat_last_n=256, max_tokens=600, ignore_eos=True, context_policy="shift")
    text = stream.text()
    assert stream.usage.completion_tokens == 600 and stream.finish_reason is FinishReason.LENGTH
    assert 600 // 128 <= stream.timings.shifts <= 600 // least_freed(256)
    assert stream.usage.total_tokens - stream.usage.dropped_tokens <= 257
    # Still text at its end: many different words of letters.
    end = text[-400:]
    assert sum(character.isalpha() or character in " \n.,'\"" for character in end) > 340
    assert len(set(end.split())) > 25 and max(map(len, end.split())) < 30

    # A request after it goes on from nothing that was computed in the sight of what is gone.
    again = small.chat(asked, temperature=0, max_tokens=8)
    again.text()
    head = small.count_tokens(chat("", system="You tell stories."))
    assert again.usage.cached_tokens < head
    assert "Tokyo" in small.chat(chat("What is the capital of Japan?"), temperature=0, max_tokens=16).text()


def test_a_conversation_that_shares_cells_with_one_that_shifts_is_unharmed(small) -> None:
    counted = ", ".join(map(str, range(1, 45))) + ","                  # its continuation leaves no doubt, however it is computed
    before = small.generate(counted, temperature=0, max_tokens=16).text()
    assert before.startswith(" 45, 46,")
    long = small.generate(counted, temperature=0, max_tokens=120, context_policy="shift")
    small.generate(counted, temperature=0, max_tokens=4).text()        # holds the same cells in another slot while `long` runs
    long.text()
    assert long.usage.completion_tokens == 120 and long.timings.shifts > 0 and long.usage.cached_tokens > 100
    after = small.generate(counted, temperature=0, max_tokens=16)
    assert after.text() == before and after.usage.cached_tokens == after.usage.prompt_tokens - 1


def test_a_long_chat_is_cut_between_its_turns(small) -> None:
    # case 69
    filler = [f"Number {at}: " + "the boats come in and go out again with every tide. " * 3 for at in range(8)]
    told = chat(*filler, "What is the capital of France?", system="You answer with one word.")
    with pytest.raises(ContextLengthExceeded):
        small.chat(told)
    for policy in ("shift", "truncate_middle"):
        stream = small.chat(told, temperature=0, max_tokens=24, context_policy=policy)
        assert stream.text() and stream.usage.dropped_tokens > 0
        assert stream.usage.prompt_tokens + stream.usage.dropped_tokens == small.count_tokens(told)


def test_the_command_line_says_what_was_dropped(smollm2_gguf) -> None:
    command = [sys.executable, "-m", "edgeinfer", "run", str(smollm2_gguf), "-", "-c", "128", "-n", "16", "--temp", "0", "--offline"]
    text = "The boats come in with every tide. " * 40
    refused = subprocess.run(command, input=text, capture_output=True, text=True)
    assert refused.returncode == 2 and "the context holds 128" in refused.stderr and "--context-policy" in refused.stderr
    done = subprocess.run([*command, "--context-policy", "truncate_middle"], input=text, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() and "older tokens were dropped" in done.stderr
