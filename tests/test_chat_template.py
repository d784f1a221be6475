"""Chat templates and the token ids they become: real formats, refusals, messages, hostile templates, BOS."""

from __future__ import annotations

from datetime import datetime

import pytest
from chat_templates import ASSISTANT, CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3, SYSTEM, USER, ByteVocab

from edgeinfer.errors import BadRequest, ChatTemplateError
from edgeinfer.models.chat_messages import normalise_messages
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.runtime.chat_format import encode_chat, encode_prompt, with_bos


def test_chatml():
    assert ChatTemplate(CHATML).render([USER, ASSISTANT, USER]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(CHATML).render([USER], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_llama3_with_date_and_tools():
    # case 38
    template = ChatTemplate(LLAMA3, bos_text="<|begin_of_text|>")
    text = template.render([SYSTEM, {"role": "user", "content": " Hi \n"}], tools=[{"name": "f", "ä": "<é>"}])
    assert text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: ")
    assert datetime.strptime(text.split("Today Date: ")[1][:11], "%d %b %Y")
    assert '{\n    "name": "f",\n    "ä": "<é>"\n}\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>' in text
    assert "Today Date: 1 May\n" in template.render([USER], date_string="1 May")


@pytest.mark.parametrize("code", ["%Y-%m-%d", "%H:%M", "%d %B %Y", "%A", "%j", "%%", "%I %p"])
def test_strftime_now_takes_any_format(code):
    # case 38
    before = datetime.now().strftime(code)
    found = ChatTemplate("{{ strftime_now('" + code + "') }}").render([USER])
    assert found in (before, datetime.now().strftime(code))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% if true %}\n    a\n{% endif %}\n", "    a\n"),
        ("  {% set x = 1 %}\nb", "b"),
        ("{{ {'b': 'é<', 'a': [1, true, none]} | tojson }}", '{"b": "é<", "a": [1, true, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ ['é'] | tojson(ensure_ascii=true) }}", '["\\u00e9"]'),
        ("{% generation %}\nx{{ messages[0].content }}\n{% endgeneration %}", "xHi\n"),
        ("{{ unknown }}|{{ messages[0].unknown }}|{{ bos_token is defined }}|{{ tools is none }}|{{ documents is none }}", "||False|True|True"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{% for i in 'ab' %}{{ f(i) }}{{ loop.last }}{% endfor %}", "[a]False[b]True"),
        ("{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ m.content }}{% else %}none{% endfor %}", "1Hi"),
        ("{% set n = namespace(a=[]) %}{% for i in range(3) %}{% set n.a = n.a + [i] %}{% endfor %}{{ n.a|join(',') }}{{ n.a|length }}", "0,1,23"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|first }}", "Hi"),
        ("{{ 'a' ~ 1 ~ none ~ 'b' * 2 }}{{ '%s-%03d' % ('x', 7) }}{{ '{}/{x:>3}'.format(1, x=2) }}", "a1Nonebbx-0071/  2"),
        ("{{ 'A,b'.split(',')|join(';')|upper }}{{ ' x '.strip() }}{{ 'abc'[::-1] }}{{ 'aXbX'.replace('X', 'y') }}", "A;Bxcbaayby"),
        ("{% set t = (1, 2) %}{% set d = dict(a=1) %}{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}{{ t[1] }}{{ d.get('q', 5) }}", "a125"),
        ("{% for x in [[1, [2]], [3, []]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}", "(1(2))(3())"),
        ("{% call(x) m() %}<{{ x }}>{% endcall %}", None),
        ("{{ ''|default('d', true) }}{{ 3|string }}{{ 'a\nb'|indent(2) }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ 7 % 4 }}", "d3a\n  b383"),
    ],
)
def test_what_hugging_face_templates_expect(source, expected):
    # case 38 (+ #465: strftime_now not defined at all)
    template = ChatTemplate(source)
    if expected is None:
        with pytest.raises(ChatTemplateError):
            template.render([USER])
    else:
        assert template.render([USER]) == expected


def test_long_conversations_stay_within_the_budget():
    chat = [{"role": role, "content": "word " * 400} for _ in range(500) for role in ("user", "assistant")]
    gathering = "{% set ns = namespace(m=[]) %}{% for x in messages %}{% set ns.m = ns.m + [x] %}{% endfor %}{{ ns.m }}"
    for source in (CHATML, LLAMA3, GEMMA, MISTRAL, QWEN3, gathering):
        assert len(ChatTemplate(source, bos_text="<s>", eos_text="</s>").render(chat)) > 1_900_000


# ---------------------------------------------------------------------------------------------------------- refusals and policy


def test_a_template_that_refuses_is_an_error_with_its_own_words():
    # case 40: never another format
    for source, words in ((GEMMA, "Conversation roles must alternate"), (MISTRAL, "After the optional system message, conversation roles must")):
        template = ChatTemplate(source, bos_text="<s>", eos_text="</s>")
        with pytest.raises(ChatTemplateError, match=words):
            template.render([USER, USER])
        with pytest.raises(ChatTemplateError, match=words):
            encode_chat(ByteVocab(), template, [USER, USER])
        assert template.render([USER, ASSISTANT, USER])


def test_system_text_joins_the_first_user_turn_where_the_role_is_refused():
    # case 39
    template = ChatTemplate(GEMMA, bos_text="<bos>")
    assert template.takes_system is False
    assert template.render([SYSTEM, USER]) == "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    two = [SYSTEM, {"role": "system", "content": "In French."}, USER, ASSISTANT, USER]
    assert "user\nBe brief.\n\nIn French.\n\nHi<end_of_turn>" in template.render(two)
    assert template.render([USER]) == "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"


def test_system_text_that_a_template_would_drop_is_merged_too():
    # case 39: a system prompt that vanishes is worse than one in another place
    template = ChatTemplate("{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}")
    assert template.render([SYSTEM, USER]) == "user:Be brief.\n\nHi;"


def test_templates_with_a_system_role_are_left_alone():
    for source in (CHATML, LLAMA3, MISTRAL, QWEN3):
        assert ChatTemplate(source, bos_text="<s>", eos_text="</s>").takes_system is True


def test_a_system_message_that_is_not_first_gets_the_templates_own_error():
    # case 39 (+ Eta#59: system message not first)
    with pytest.raises(ChatTemplateError, match="must alternate"):
        ChatTemplate(GEMMA, bos_text="<bos>").render([USER, ASSISTANT, SYSTEM])
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        ChatTemplate(GEMMA, bos_text="<bos>").render([SYSTEM])


def test_developer_is_the_system_role_unless_the_template_knows_it():
    developer = {**SYSTEM, "role": "developer"}
    assert ChatTemplate(CHATML).render([developer, USER]) == ChatTemplate(CHATML).render([SYSTEM, USER])
    assert ChatTemplate("{# developer #}" + CHATML).render([developer, USER]).startswith("<|im_start|>developer\n")


@pytest.mark.parametrize("source", [None, ""])
def test_no_template_says_what_to_do(source):
    with pytest.raises(ChatTemplateError, match=r"no chat template.*generate\(\).*--chat-template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for x in %}", "syntax error in line 1"), ("a\n{{ x", "syntax error in line 2"), ("{% include 'x' %}", "no loader"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ x.y.z }}", "undefined"), ("{{ messages[0].content + 1 }}", "str"), ("{{ nothing() }}", "undefined"), ("{{ 'x'|nofilter }}", "nofilter"),
        ("{{ messages.append(1) }}", "not allowed"), ("{{ messages[0].update({}) }}", "not allowed"), ("{{ raise_exception() }}", "message"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"), ("x" * 1_000_001, "1,000,001 characters"),
    ],
)
def test_broken_templates(source, words):
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source).render([USER])


# --------------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("content", [None, "", "missing", []])
def test_a_tool_turn_without_content_renders(content):
    # case 41: Qwen3 slices content; null, missing and "" are the same
    turn = {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
    if content == "missing":
        del turn["content"]
    text = ChatTemplate(QWEN3).render([USER, turn, {"role": "tool", "content": "42", "tool_call_id": "1"}])
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n42\n</tool_response>" in text
    assert "None" not in text
    llama = ChatTemplate(LLAMA3, bos_text="<s>").render([USER, turn])
    assert '{"name": "f", "parameters": {"a": 1}}<|eot_id|>' in llama


def test_text_parts_are_joined_and_empty_tool_calls_dropped():
    # case 41 (+ vllm#13978: tool_calls [])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = ({"role": "user", "content": parts}, {"role": "assistant", "content": "c", "tool_calls": []})
    assert normalise_messages(messages) == [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert messages[1]["tool_calls"] == []                              # the caller's own is unchanged
    assert ChatTemplate(LLAMA3, bos_text="").render(list(messages)).count("<|eot_id|>") == 3


def test_a_field_that_is_not_there_is_undefined():
    # case 41 (+ lmstudio#393)
    assert ChatTemplate("{% if messages[0].reasoning %}x{% endif %}ok").render([USER]) == "ok"


def test_arguments_that_are_no_json_object_stay_as_they_were_said():
    call = {"function": {"name": "f", "arguments": "{broken"}}
    assert normalise_messages([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "must be a list"), (None, "must be a list"), (5, "must be a list"), ({"role": "user"}, "must be a list"), ([], "at least one"),
        ([USER, "x"], "Message 2 must be an object"), ([None], "Message 1"), ([{"content": "x"}], "Message 1 has the role None"),
        ([USER, {"role": "wizard"}], "Message 2 has the role 'wizard'"), ([{"role": ["user"]}], "Message 1 has the role"),
        ([{"role": "user", "content": 5}], "content of message 1"), ([{"role": "user", "content": {"a": 1}}], "content of message 1"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "Message 1 .*'image_url'.*only text"),
        ([{"role": "user", "content": [5]}], "'int'"), ([{"role": "user", "content": [{"type": "text"}]}], "Message 1"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls of message 1"), ([{"role": "assistant", "tool_calls": [{}]}], "no function name"),
    ],
)
def test_malformed_messages_are_refused_by_position(messages, words):
    # case 41
    with pytest.raises(BadRequest, match=words):
        ChatTemplate(CHATML).render(messages)
    with pytest.raises(BadRequest, match=words):
        encode_chat(ByteVocab(), ChatTemplate(CHATML), messages)


@pytest.mark.parametrize("name", ["messages", "bos_token", "eos_token"])
def test_options_cannot_replace_what_the_chat_sets(name):
    with pytest.raises(BadRequest, match=name):
        encode_chat(ByteVocab(), ChatTemplate(CHATML), [USER], **{name: "x"})


def test_thinking_is_split_off_earlier_turns():
    chat = [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}, USER]
    vocab = ByteVocab()
    ids = encode_chat(vocab, ChatTemplate(QWEN3), chat, enable_thinking=False)
    assert vocab.text(ids) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


# --------------------------------------------------------------------------------------------------------------- hostile templates

HOSTILE = {
    "class": "{{ ''.__class__ }}",
    "mro": "{{ [].__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ ''|attr('__class__') }}",
    "item": "{{ ''['__class__'] }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "format_map": "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "function globals": "{{ strftime_now.__globals__ }}",
    "macro": "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
    "self": "{{ self._TemplateReference__context }}",
    "range": "{{ range(1000000000)|list }}",
    "nested loops that print nothing": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "loop filter": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "set block": "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endfor %}{% endset %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "tree of calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "times": "{{ 'a' * 1000000000 }}",
    "list times": "{{ ([1] * 100000) * 100000 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling by plus": "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by tilde": "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "shared lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "shared dictionaries": "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x|tojson }}",
    "center": "{{ 'a'|center(1000000000) }}",
    "indent": "{{ ('a\n' * 100000)|indent('b' * 100000) }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "json indent": "{{ [[1]]|tojson(indent=1000000000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent filter": "{{ '%1000000000d'|format(1) }}",
    "brace": "{{ '{:1000000000}'.format(1) }}",
    "brace width": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "replace": "{% set a = 'x' * 100000 %}{{ a.replace('x', a) }}",
    "replace filter": "{% set a = 'x' * 100000 %}{{ a|replace('x', a) }}",
    "join": "{{ range(99999)|join('x' * 100000) }}",
    "join method": "{{ ('x' * 100000).join(('x' * 100000)) }}",
    "folded when compiled": "{% if 'a'|center(1000000000) %}{% endif %}{{ 'a'|center(1000000000) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_end_as_errors(source):
    # case 43: nothing is executed, nothing runs or grows without end
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render([USER])


def test_a_filter_chain_without_loops_meets_the_clock(monkeypatch):
    # case 43
    monkeypatch.setattr("edgeinfer.models.template_budget.MAX_CPU_SECONDS", 0.2)
    with pytest.raises(ChatTemplateError, match="0.2 seconds"):
        ChatTemplate("{{ range(99999)|select('in', range(99999)|list)|list|length }}").render([USER])


def test_one_failed_rendering_does_not_touch_the_next():
    template = ChatTemplate("{% for j in range(99999) %}{% for k in range(20) %}{% endfor %}{% endfor %}ok")
    with pytest.raises(ChatTemplateError, match="steps"):
        template.render([USER])
    assert ChatTemplate(CHATML).render([USER])
    with pytest.raises(ChatTemplateError, match="steps"):
        template.render([USER])


# -------------------------------------------------------------------------------------------------------------------------- BOS


@pytest.mark.parametrize("source", [LLAMA3, GEMMA, MISTRAL, CHATML])
def test_exactly_one_bos_in_a_chat(source):
    # case 36: the template prints BOS and the tokenizer adds it; case 37: the template does not and the tokenizer wants it
    vocab = ByteVocab(adds_bos=True)
    for bos_text in ("<s>", "<s><s>"):
        ids = encode_chat(vocab, ChatTemplate(source, bos_text=bos_text, eos_text="</s>"), [USER, ASSISTANT, USER])
        assert ids[0] == vocab.bos_id and ids.count(vocab.bos_id) == 1


def test_without_add_bos_the_template_decides():
    vocab = ByteVocab(adds_bos=False)
    assert encode_chat(vocab, ChatTemplate(GEMMA, bos_text="<s>"), [USER]).count(vocab.bos_id) == 1
    assert encode_chat(vocab, ChatTemplate(CHATML), [USER]).count(vocab.bos_id) == 0


@pytest.mark.parametrize("typed", ["", "<s>", "<s><s>"])
def test_exactly_one_bos_in_a_raw_prompt(typed):
    # case 36 (+ #1561: the user types BOS)
    vocab = ByteVocab(adds_bos=True)
    assert encode_prompt(vocab, typed + "Hi") == [vocab.bos_id, *b"Hi"]
    assert encode_prompt(ByteVocab(adds_bos=False), typed + "Hi") == [vocab.bos_id] * typed.count("<s>") + [*b"Hi"]


def test_bos_at_the_edges():
    vocab = ByteVocab(adds_bos=True)
    assert with_bos(vocab, []) == with_bos(vocab, [vocab.bos_id] * 3) == [vocab.bos_id]
    assert encode_prompt(vocab, "a<s>b") == [vocab.bos_id, *b"a", vocab.bos_id, *b"b"]
