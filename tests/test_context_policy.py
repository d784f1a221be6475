"""What goes when a conversation is longer than the context, as pure functions, on the scripted backend and on llama.cpp."""

from __future__ import annotations

from functools import cache, partial

import pytest
from chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3, ByteVocab
from hypothesis import example, given, settings, strategies as st

from edgeinfer.errors import BadRequest, ContextLengthExceeded
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.runtime.chat_format import encode_chat
from edgeinfer.runtime.context_policy import SINKS, answer_limit, fit_chat, fit_prompt, least_freed, plan_shift, system_length

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
DEFAULTED = (                            # as SmolLM2's and Qwen 2.5's: a system prompt of its own where none is given
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant"
    "<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "qwen3": QWEN3, "llama2": LLAMA2, "defaulted": DEFAULTED,
}
IN_FRONT = sorted(set(TEMPLATES) - {"mistral"})          # Mistral's puts the system message into the last user turn
POLICIES = ("shift", "truncate_middle")
VOCAB = ByteVocab()


@cache
def encoder(name: str):
    return partial(encode_chat, VOCAB, ChatTemplate(TEMPLATES[name], bos_text="<s>", eos_text="</s>"))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def talk(*lengths: int) -> list[dict[str, str]]:
    """user, assistant, user, ...: each names itself and has about so many characters."""
    return [{"role": ("user", "assistant")[at % 2], "content": f"[{at}:" + "x" * (length - 5) + "]"} for at, length in enumerate(lengths)]


def is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(token in rest for token in part)


# ------------------------------------------------------------------------------------------------------------------ raw prompts


def test_error_refuses_with_both_numbers_and_changes_nothing():
    # case 69: 400 with both numbers by default
    tokens = list(range(100))
    assert fit_prompt(tokens, 0, 100, "error").tokens == tokens
    with pytest.raises(ContextLengthExceeded) as caught:
        fit_prompt(tokens, 0, 99, "error")
    assert (caught.value.needed, caught.value.available) == (100, 99)


@settings(max_examples=400)
@given(
    length=st.integers(1, 3000), keep=st.integers(0, 400), room=st.integers(8, 1000), policy=st.sampled_from(POLICIES),
    max_tokens=st.none() | st.integers(0, 2000),
)
def test_a_cut_prompt(length, keep, room, policy, max_tokens):
    """Never above the room, head and newest kept in order, nothing uncounted, room for the answer."""
    tokens, keep = list(range(length)), min(keep, length)
    try:
        fit = fit_prompt(tokens, keep, room, policy, max_tokens)
    except ContextLengthExceeded as error:
        # case 70: only where the head alone is the trouble
        assert room - max(keep, SINKS) < room // 8 + least_freed(room) and (error.needed, error.available) == (length, room)
        return
    kept = fit.tokens
    assert len(kept) <= room and len(kept) + fit.dropped == length
    assert fit.keep == max(keep, SINKS) and kept[:fit.keep] == tokens[:fit.keep]
    answer = min(room // 8, room if max_tokens is None else max(0, max_tokens - 1))
    assert len(kept) + answer <= room
    if length + answer <= room:
        assert kept == tokens
    else:
        cut = next(at for at, token in enumerate(kept) if token != at)
        assert kept[cut:] == tokens[cut + fit.dropped:] and len(kept) > cut          # one hole, and the newest token is there
        # Whatever is cut, three quarters of what can be kept beside the head are.
        assert len(kept) >= cut + 3 * (room - answer - cut) // 4
        assert cut == (fit.keep if policy == "shift" else max(fit.keep, (room - answer) // 2))


def test_being_over_by_little_does_not_cost_half():
    # case 69 (+ #3839, #17427: ctx + 5 in, ctx/2 + 2 counted)
    for policy in POLICIES:
        assert len(fit_prompt(list(range(4101)), 0, 4096, policy).tokens) > 0.65 * 4096


@pytest.mark.parametrize("keep", [4000, 4090, 4092, 4096, 4100, 9000])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_head_that_leaves_no_room_is_refused_with_both_numbers_and_the_way_out(keep, policy):
    # case 70: kept 4092 of 4096, kept > n_ctx
    with pytest.raises(BadRequest) as caught:
        fit_prompt(list(range(keep + 300)), keep, 4096, policy)
    for words in (f"{keep + 300:,}", f"{keep:,}", "4,096", "--ctx-size"):
        assert words in str(caught.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_growing_prompt_is_cut_at_few_places(policy):
    """Between two places every prompt continues the one before, so that its KV is reused."""
    tokens = list(range(8000))
    kept = [fit_prompt(tokens[:length], 100, 1000, policy).tokens for length in range(1000, 3000, 20)]
    continued = sum(after[:len(before)] == before for before, after in zip(kept, kept[1:]))
    assert continued >= 0.75 * (len(kept) - 1)


# ------------------------------------------------------------------------------------------------------------- running sequences


@settings(max_examples=400)
@given(keep=st.integers(0, 5000), n_ctx=st.integers(1, 4096), held=st.integers(0, 4096))
def test_a_shift_frees_enough_and_leaves_the_newest(keep, n_ctx, held):
    drop = plan_shift(held, keep, n_ctx)
    assert drop >= 0
    if drop:
        least = least_freed(n_ctx)
        assert drop >= least and held - keep - drop >= least           # what is left of the unkept: the newest


@settings(max_examples=200)
@given(prompt=st.integers(1, 500), keep=st.integers(0, 600), n_ctx=st.integers(4, 500), answer=st.integers(0, 3000))
def test_shifts_are_bounded_and_end(prompt, keep, n_ctx, answer):
    """case 70: no shift at every token; a sequence that cannot shift ends."""
    held, generated, shifts = min(prompt, n_ctx), 0, 0
    while generated < answer:
        if held == n_ctx:
            drop = plan_shift(held, keep, n_ctx)
            if drop == 0:
                assert n_ctx - keep < 2 * least_freed(n_ctx)
                break
            held, shifts = held - drop, shifts + 1
        held, generated = held + 1, generated + 1
    assert shifts <= generated // least_freed(n_ctx) + 1


@settings(max_examples=300)
@given(length=st.integers(1, 3000), keep=st.integers(0, 1000), room=st.integers(16, 1000), max_tokens=st.none() | st.integers(1, 2000))
def test_what_was_cut_for_shifting_can_shift_or_need_not(length, keep, room, max_tokens):
    try:
        fit = fit_prompt(list(range(length)), min(keep, length), room, "shift", max_tokens)
    except ContextLengthExceeded:
        return
    if fit.dropped:
        answered = max_tokens is not None and len(fit.tokens) + max_tokens - 1 <= room
        assert answered or plan_shift(room, fit.keep, room) > 0


def test_max_tokens_counts_the_whole_answer_and_an_endless_one_ends():
    # case 70, ollama#3583 of case 72: n_ctx 128, a log that grows without end
    assert answer_limit(1000, 128, "shift") == 1000
    assert answer_limit(None, 128, "shift") == 128
    assert answer_limit(None, 128, "error") is None and answer_limit(5, 128, "truncate_middle") == 5


# -------------------------------------------------------------------------------------------------------------- the system turn


@pytest.mark.parametrize("name", IN_FRONT)
@pytest.mark.parametrize("question", ["How are you?", "A", "B", "", " A tale"])
def test_the_system_turn_is_found_in_every_template(name, question):
    encode = encoder(name)
    chat = [system("Speak like a pirate."), user(question), *talk(20, 20, 20)[1:]]
    tokens = encode(chat)
    keep = system_length(encode, chat, tokens)
    head = VOCAB.text(tokens[:keep])
    assert "Speak like a pirate." in head
    assert head.endswith(("\n", " ", ">")) or not question             # it ends where the user's words begin
    assert VOCAB.text(tokens[keep:]).lstrip().startswith(question.strip())


def test_default_prompts_tools_and_bos_count():
    encode = encoder("defaulted")
    tokens = encode([user("Hi")])
    assert "helpful AI assistant" in VOCAB.text(tokens[:system_length(encode, [user("Hi")], tokens)])
    encode = partial(encoder("llama3"), tools=[{"type": "function", "function": {"name": "weather"}}])
    tokens = encode([user("Hi")])
    assert "weather" in VOCAB.text(tokens[:system_length(encode, [user("Hi")], tokens)])
    vocab = ByteVocab(adds_bos=True)
    encode = partial(encode_chat, vocab, ChatTemplate(CHATML))
    tokens = encode([user("Hi")])
    assert tokens[0] == vocab.bos_id and system_length(encode, [user("Hi")], tokens) > 1


def test_several_system_messages_and_developer_messages_are_all_kept():
    encode = encoder("chatml")
    chat = [system("One."), {"role": "developer", "content": "Two."}, user("Hi")]
    tokens = encode(chat)
    assert VOCAB.text(tokens[:system_length(encode, chat, tokens)]).count("<|im_end|>") == 2


# ------------------------------------------------------------------------------------------------------------------------ chats


def shown(name: str, fit) -> str:
    return VOCAB.text(fit.tokens)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("policy", POLICIES)
def test_whole_turns_go_and_the_rest_renders_as_ever(name, policy):
    # case 69: opt-in trimming keeps the system turn and is reported
    encode = encoder(name)
    chat = [system("The secret word is XYZZY."), *talk(80, 120, 90, 110, 100, 120, 80, 100, 60)]
    total = len(encode(chat))
    room = 3 * total // 4
    fit = fit_chat(encode, chat, room, policy, 64)
    text = shown(name, fit)
    assert len(fit.tokens) <= room - 63 and len(fit.tokens) + fit.dropped == total and fit.dropped > 0
    assert "XYZZY" in text and "[8:" in text
    kept = [at for at in range(9) if f"[{at}:" in text]
    first = [0, 1] if policy == "truncate_middle" else []
    assert kept == first + list(range(kept[len(first)], 9))
    # Nothing is half: the same text as if the dropped turns had never been said.
    assert fit.tokens == encode([chat[0], *(chat[1 + at] for at in kept)])
    if name != "mistral":
        assert "XYZZY" in VOCAB.text(fit.tokens[:fit.keep])


@pytest.mark.parametrize("policy", ("error", *POLICIES))
def test_what_fits_is_untouched(policy):
    encode = encoder("chatml")
    chat = [system("Be brief."), *talk(50, 50, 50)]
    fit = fit_chat(encode, chat, 1000, policy)
    assert fit.tokens == encode(chat) and fit.dropped == 0


def test_error_refuses_a_long_chat():
    # case 69
    with pytest.raises(ContextLengthExceeded):
        fit_chat(encoder("chatml"), talk(500, 500, 500), 1000, "error")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_last_message_that_is_too_long_is_cut_inside_its_words(name, policy):
    encode = encoder(name)
    long = "BEGIN" + "".join(f"<{n}>" for n in range(400)) + "END"
    chat = [system("The secret word is XYZZY."), *talk(20, 20), user(long)]
    fit = fit_chat(encode, chat, 640, policy)
    text = shown(name, fit)
    assert len(fit.tokens) <= 560 and len(fit.tokens) + fit.dropped == len(encode(chat))
    assert "XYZZY" in text and "END" in text and ("BEGIN" in text) == (policy == "truncate_middle")
    # As many turn markers as the same chat with a short last message, in the same order.
    front = chat[1:3] if policy == "truncate_middle" else []
    whole = encode([chat[0], *front, user("short")])
    assert [token for token in fit.tokens if token > 255] == [token for token in whole if token > 255]


def test_a_document_with_questions_keeps_its_beginning():
    encode = encoder("chatml")
    chat = [system("Be brief."), user("TITLE" + "d" * 2000), assistant("ok"), user("the question")]
    text = shown("chatml", fit_chat(encode, chat, 1000, "truncate_middle"))
    assert "Be brief." in text and "TITLE" in text and "the question" in text


def test_of_a_chain_of_tool_calls_the_oldest_go_and_the_question_stays():
    # case 69 (+ lmstudio#1806: an oversized tool result gives garbage)
    encode = encoder("qwen3")
    chain = []
    for at in range(6):
        chain += [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": at}}}]},
            {"role": "tool", "content": f"[{at}:" + "r" * 200},
        ]
    chat = [system("Be brief."), *talk(100, 100), user("the question"), *chain]
    for policy in POLICIES:
        fit = fit_chat(encode, chat, 900, policy)
        text = shown("qwen3", fit)
        assert "Be brief." in text and "the question" in text and "[5:" in text and "[0:" not in text
        assert text.count("<tool_call>") == text.count("<tool_response>")
    # One result that is too long by itself: the question stays, and the result loses its beginning or its middle.
    chat = [system("Be brief."), user("the question"), chain[0], {"role": "tool", "content": "r" * 2000 + "END"}]
    for policy in POLICIES:
        text = shown("qwen3", fit_chat(encode, chat, 900, policy))
        assert "the question" in text and "END</tool_response>" in text.replace("\n", "") and "<tool_response>" in text


def test_a_system_message_that_leaves_no_room_is_refused():
    # case 70
    for policy in POLICIES:
        with pytest.raises(BadRequest, match="--ctx-size"):
            fit_chat(encoder("chatml"), [system("s" * 990), user("x" * 100)], 1000, policy)


def test_a_growing_chat_is_cut_at_few_places():
    encode = encoder("chatml")
    chat, prompts = [system("Be brief.")], []
    for at in range(60):
        chat += [user(f"[{at}:" + "q" * 40)]
        prompts.append(fit_chat(encode, chat, 2000, "shift", 200).tokens)
        chat += [assistant(f"[{at}:" + "a" * 60)]
    end = len("<|im_start|>assistant\n")
    continued = sum(after[:len(before) - end] == before[:len(before) - end] for before, after in zip(prompts, prompts[1:]))
    assert continued >= 44                                             # every third turn or so, not in every one


def test_long_chats_are_rendered_a_few_times_only():
    calls = 0

    def encode(messages):
        nonlocal calls
        calls += 1
        return encoder("chatml")(messages)

    fit_chat(encode, talk(*[40] * 999), 2000, "shift")
    assert calls <= 14
    calls = 0
    fit_chat(encode, talk(40), 2000, "error")
    assert calls == 1


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(5, 300), min_size=1, max_size=12).filter(lambda lengths: len(lengths) % 2 == 1),
    words=st.integers(0, 200), room=st.integers(150, 900), policy=st.sampled_from(POLICIES), max_tokens=st.none() | st.integers(0, 300),
    name=st.sampled_from(sorted(TEMPLATES)),
)
@example(lengths=[5], words=115, room=150, policy="shift", max_tokens=None, name="mistral")
def test_any_chat_fits_or_is_refused_because_of_its_system_turn(lengths, words, room, policy, max_tokens, name):
    encode = encoder(name)
    chat = [*([system("S" * words)] if words else []), *talk(*lengths)]
    tokens = encode(chat)
    try:
        fit = fit_chat(encode, chat, room, policy, max_tokens)
    except ContextLengthExceeded:
        least = [*(chat[:1] if words else []), chat[-1]]     # what is never dropped; one template puts the system text into the last turn
        head = system_length(encode, least, encode(least))
        assert head + room // 8 + least_freed(room) > room
        return
    assert len(fit.tokens) <= room and len(fit.tokens) + fit.dropped == len(tokens)
    assert fit.tokens[-5:] == tokens[-5:]
    assert is_subsequence(fit.tokens, tokens) or name == "mistral"
    if words and name != "mistral":
        assert "S" * words in VOCAB.text(fit.tokens)
