"""Chat templates as models carry them, reduced to what differs, and a vocabulary of bytes and markers to try them with."""

from __future__ import annotations

import re

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\n' -}}
{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" or (message["role"] == "assistant" and not message.tool_calls) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}{%- endif %}
{%- endfor %}"""

QWEN3 = """{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user"
           and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in message.content %}
                {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
                {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

TOJSON = """{% for message in messages %}<|im_start|>{{ message | tojson }}<|im_end|>{% endfor %}"""
PRINTED = """{% for message in messages %}<|im_start|>{{ message }}{{ [message.content] }}<|im_end|>{% endfor %}"""
TOJSON_ASCII = """{% for message in messages %}<|im_start|>{{ message.content | tojson(ensure_ascii=true) }}<|im_end|>{% endfor %}"""
GLUED = """{% for message in messages %}{{ message.content }}{% endfor %}<|im_start|>"""
REMOVING = """{% for m in messages %}<|im_start|>{{ m.content | replace('<think>', '') | replace('@', '') }}<|im_end|>{% endfor %}"""
FINISHING = """{% for m in messages %}<|im_start|>{{ m.content }}|>{{ m.content | trim }}>{% endfor %}"""

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


class ByteVocab:
    """Ids 0 .. 255 are bytes; markers follow. Control markers match when asked for, user markers always, the longest first, as in llama.cpp."""

    chat_template = None
    end_ids = frozenset()

    def __init__(
        self,
        *,
        markers=("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"),
        user_markers=("<think>", "</think>", "<table>", "\n\n"),
        adds_bos=False,
    ):
        self.markers, self.user_markers, self.adds_bos = tuple(markers), tuple(user_markers), adds_bos
        self.ids = {text: 256 + at for at, text in enumerate((*markers, *user_markers))}
        self.bos_id = self.ids.get("<s>")

    def encode(self, text: str, *, add_special: bool, parse_special: bool, opening=True) -> list[int]:
        known = sorted(self.ids if parse_special else self.user_markers, key=len, reverse=True)
        ids = [self.bos_id] if add_special and self.adds_bos else []
        for piece in re.split("(" + "|".join(map(re.escape, known)) + ")", text) if known else [text]:
            ids += [self.ids[piece]] if piece in known else piece.encode("utf-8", "surrogatepass")
        return ids

    def control(self, ids: list[int]) -> list[str]:
        """The control markers among ``ids``, in order."""
        return [text for token in ids for text in self.markers if self.ids[text] == token]

    def text(self, ids: list[int]) -> str:
        back = {token: text.encode() for text, token in self.ids.items()}
        return b"".join(back.get(token, bytes([token % 256])) for token in ids).decode("utf-8", "replace")
