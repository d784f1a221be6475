"""Embeddings over HTTP, with the openai package as the client."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest
from edgeinfer.runtime.backends.fake import ScriptedBackend
from edgeinfer.runtime.service import Engine
from server_process import Server, serving

TEXTS = ["the cat sat on the mat", "a", "é日本🙂"]
TOKENS = [list(text.encode()) for text in TEXTS]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Engine(ScriptedBackend(n_ctx=300))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)


def post(server: Server, body: object) -> httpx.Response:
    return httpx.post(server.v1 + "/embeddings", json=body)


def vectors(answer: openai.types.CreateEmbeddingResponse) -> np.ndarray:
    assert [item.index for item in answer.data] == list(range(len(answer.data))) and all(item.object == "embedding" for item in answer.data)
    return np.array([item.embedding for item in answer.data], np.float32)


def test_the_package_gets_the_same_numbers_in_either_format(client, server) -> None:
    default = client.embeddings.create(model="scripted", input=TEXTS)            # the package asks for base64 and decodes it
    floats = client.embeddings.create(model="scripted", input=TEXTS, encoding_format="float", user="somebody")
    assert np.array_equal(vectors(default), vectors(floats)) and vectors(floats).shape == (3, 8)
    assert default.object == "list" and default.model == "scripted"
    assert default.usage.prompt_tokens == default.usage.total_tokens == sum(map(len, TOKENS))
    raw = post(server, {"input": TEXTS, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), vectors(default)[0])
    assert isinstance(post(server, {"input": "x"}).json()["data"][0]["embedding"], list), "floats unless base64 is asked for"
    np.testing.assert_allclose(np.linalg.norm(vectors(default), axis=1), 1, atol=1e-6)


def test_the_four_shapes_of_input_and_lists_one_by_one(client) -> None:
    together = vectors(client.embeddings.create(model="scripted", input=TEXTS))
    for inputs in (TEXTS, TOKENS):
        for expected, item in zip(together, inputs, strict=True):
            assert np.array_equal(vectors(client.embeddings.create(model="scripted", input=item))[0], expected)
            assert np.array_equal(vectors(client.embeddings.create(model="scripted", input=[item]))[0], expected)
    assert np.array_equal(vectors(client.embeddings.create(model="scripted", input=TOKENS)), together)


def test_fewer_dimensions_are_the_first_ones_made_a_unit_vector_again(client, server) -> None:
    whole = vectors(client.embeddings.create(model="scripted", input=TEXTS))
    for count in (1, 3, 8):
        cut = vectors(client.embeddings.create(model="scripted", input=TEXTS, dimensions=count))
        expected = whole[:, :count] / np.linalg.norm(whole[:, :count], axis=1, keepdims=True)
        np.testing.assert_allclose(cut, expected, atol=1e-6)
    refused(post(server, {"input": "x", "dimensions": 9}), "dimensions", "have 8")


def refused(reply: httpx.Response, param: str | None, words: str, status: int = 400) -> None:
    error = reply.json()["error"]
    assert reply.status_code == status and error["type"] == "invalid_request_error" and error["param"] == param, reply.text
    assert words in error["message"] and error["code"], reply.text


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"), ({"input": None}, "input", "input"), ({"input": 3}, "input", "input"), ({"input": {}}, "input", "input"),
        ({"input": ""}, "input", "empty"), ({"input": []}, "input", "nothing"), ({"input": ["a", ""]}, "input", "Input 1"), ({"input": [[]]}, "input", "empty"),
        ({"input": [1.5]}, "input", "input"), ({"input": ["a", 1]}, "input", "input"), ({"input": [[1], "a"]}, "input", "input"), ({"input": [True]}, "input", "input"),
        ({"input": [-1]}, "input", "input"), ({"input": [5, 99999]}, "input", "token id 99999"), ({"input": [[2**62]]}, "input", "token id"),
        ({"input": ["x"] * 2049}, "input", "2,049"), ({"input": ["fine", "x" * 301]}, "input", "301"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "float"), ({"input": "x", "dimensions": 0}, "dimensions", "dimensions"),
        ({"input": "x", "dimensions": "3"}, "dimensions", "dimensions"), ({"input": "x", "user": 3}, "user", "user"), ({"input": "x", "truncate": True}, "truncate", "not known"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_it(server, body, param, words) -> None:
    refused(post(server, body), param, words)


def test_a_text_that_is_too_long_is_not_cut(client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="scripted", input="x" * 301)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    assert "xxx" not in str(caught.value), "the text is not repeated"
    assert client.embeddings.create(model="scripted", input="x" * 300).usage.prompt_tokens == 300
    assert len(client.embeddings.create(model="scripted", input=["x"] * 2048).data) == 2048


def test_a_model_that_gives_none_and_a_model_there_is_not(client) -> None:
    backend = ScriptedBackend()
    backend.info = replace(backend.info, can_embed=False)
    with serving(Engine(backend)) as other:
        refused(post(other, {"input": "x"}), "input", "gives no embeddings")
        assert [code for _, code in other.metrics.refusals] == ["unsupported_parameter"]
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nothing", input="x")


def test_a_lenient_server_says_what_it_left_out() -> None:
    with serving(Engine(ScriptedBackend()), lenient=True) as server:
        answer = post(server, {"input": "x", "truncate": True}).json()
        assert len(answer["data"]) == 1 and "truncate" in answer["warnings"][0]


def test_embeddings_and_answers_at_once() -> None:
    with serving(Engine(ScriptedBackend([b"a"] * 40, n_ctx=300, max_batch=16))) as server:

        async def everybody() -> None:
            async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
                async def embed(number: int) -> None:
                    found = await client.embeddings.create(model="scripted", input=[f"text {number} {n} " + "x" * 10 * n for n in range(8)])
                    assert len(found.data) == 8

                async def answer(number: int) -> None:
                    found = await client.completions.create(model="scripted", prompt=f"say {number}", max_tokens=40)
                    assert found.choices[0].text == "a" * 40

                await asyncio.gather(*(each(number) for number in range(20) for each in (embed, answer)))

        asyncio.run(everybody())
        assert sum(inputs for _, inputs, _ in server.metrics.embeddings) == 160 and len(server.metrics.ends) == 20 and not server.metrics.refusals
        assert server.pool.used == 0


def test_a_client_that_leaves_takes_its_inputs_along() -> None:
    inside, release = threading.Event(), threading.Event()
    pieces: list[int] = []

    def hold(piece) -> None:
        pieces.append(piece[0])
        inside.set()
        assert release.wait(60)

    with serving(Engine(ScriptedBackend(before_embed=hold))) as server:

        async def leave() -> None:
            async with httpx.AsyncClient() as client:
                asking = asyncio.create_task(client.post(server.v1 + "/embeddings", json={"input": ["x"] * 500}))
                await asyncio.to_thread(inside.wait)
                asking.cancel()
                await asyncio.wait((asking,))
            while server.pool.used:
                await asyncio.sleep(0.002)

        asyncio.run(leave())
        release.set()
        assert post(server, {"input": "y"}).status_code == 200
        assert pieces == [ord("x"), ord("y")]
