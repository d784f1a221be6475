"""Chat completions over HTTP, with the openai package as the client."""

from __future__ import annotations

import openai
from server_process import serving

from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.service import Engine


def ask(text="hi"):
    return [{"role": "user", "content": text}]


def test_whole_and_streamed() -> None:
    with serving(Engine(ScriptedBackend([b"Hel", b"lo", b"!"]))) as server:
        client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
        whole = client.chat.completions.create(model="scripted", messages=ask())
        assert whole.choices[0].message.content == "Hello!" and whole.choices[0].finish_reason == "stop"
