"""The shapes of traffic a server meets. A scenario is data: how many clients, and which conversations they take from one queue."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from edgeinfer.runtime.bench import prompts

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """One request: messages added to the conversation so far, and how many new tokens are asked for."""

    kind: str                            # the scenario's own name, where all its requests are of one kind
    messages: tuple[Message, ...]
    max_tokens: int


@dataclass(frozen=True)
class Scenario:
    """``clients`` at once, each taking the next conversation from the queue when it is done with one; a conversation's turns follow each other."""

    name: str
    clients: int
    conversations: tuple[tuple[Turn, ...], ...]

    @property
    def requests(self) -> int:
        return sum(map(len, self.conversations))


SUMMARIES = {
    "single": "one client, one request at a time",
    "burst": "16 clients at once, prompts of many lengths",
    "shared": "8 clients, one long system prompt, short questions",
    "mixed": "10 clients, short questions beside 2,000-word prompts",
    "turns": "4 clients, each in a conversation that grows",
}


def build(name: str, *, seed: int, quick: bool = False) -> Scenario:
    """The scenario of that name. Another seed gives other words: nothing of an earlier round is in the cache."""
    return _BUILDERS[name](random.Random(f"{name} {seed}"), quick)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _single(rng: random.Random, quick: bool) -> Scenario:
    count, new = (2, 32) if quick else (8, 128)
    return Scenario("single", 1, tuple((Turn("single", (_user(prompts.text(rng, 128)),), new),) for _ in range(count)))


def _burst(rng: random.Random, quick: bool) -> Scenario:
    clients, count, longest, new = (4, 8, 80, 16) if quick else (16, 48, 320, 64)
    return Scenario("burst", clients, tuple((Turn("burst", (_user(prompts.text(rng, rng.randint(16, longest))),), new),) for _ in range(count)))


def _shared(rng: random.Random, quick: bool) -> Scenario:
    clients, count, system_words, new = (4, 8, 240, 16) if quick else (8, 24, 900, 32)
    system = {"role": "system", "content": prompts.text(rng, system_words)}
    return Scenario("shared", clients, tuple((Turn("shared", (system, _user(prompts.text(rng, 12))), new),) for _ in range(count)))


def _mixed(rng: random.Random, quick: bool) -> Scenario:
    clients, short, long, long_words, new = (4, 8, 1, 500, 16) if quick else (10, 40, 4, 2000, 32)
    conversations = [(Turn("short", (_user(prompts.text(rng, 24)),), new),) for _ in range(short)]
    conversations += [(Turn("long", (_user(prompts.text(rng, long_words)),), new),) for _ in range(long)]
    rng.shuffle(conversations)
    return Scenario("mixed", clients, tuple(conversations))


def _turns(rng: random.Random, quick: bool) -> Scenario:
    clients, count, turns, new = (2, 2, 3, 16) if quick else (4, 8, 6, 48)
    return Scenario("turns", clients, tuple(
        tuple(Turn("turns", (_user(prompts.text(rng, 60)),), new) for _ in range(turns)) for _ in range(count)
    ))


_BUILDERS: dict[str, Callable[[random.Random, bool], Scenario]] = {
    "single": _single, "burst": _burst, "shared": _shared, "mixed": _mixed, "turns": _turns,
}
NAMES = tuple(_BUILDERS)
