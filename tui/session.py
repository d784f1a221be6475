"""The conversation as data: turns, system prompt, sampling parameters. Knows neither screen nor engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from edgeinfer.runtime.values import SamplingParams


class TurnState(enum.Enum):
    """Where a turn stands."""

    ANSWERING = "answering"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass
class Turn:
    """One question with its answer, whole or partial."""

    user: str
    answer: str = ""
    state: TurnState = TurnState.ANSWERING

    @property
    def remembered(self) -> bool:
        """Whether the model is shown this turn later. Failed and empty ones are not: templates want user and assistant to alternate."""
        return bool(self.answer) and self.state in (TurnState.DONE, TurnState.STOPPED)


@dataclass
class ChatSession:
    """All that a conversation is made of."""

    system_prompt: str | None = None
    params: SamplingParams = SamplingParams()
    context_policy: str = "error"
    turns: list[Turn] = field(default_factory=list)

    def ask(self, text: str) -> Turn:
        """Start a turn."""
        turn = Turn(text)
        self.turns.append(turn)
        return turn

    def ask_again(self) -> Turn | None:
        """Forget the last turn's answer and start it anew; None when there is no turn."""
        return self.ask(self.turns.pop().user) if self.turns else None

    def clear(self) -> None:
        """Forget the turns; system prompt and sampling stay."""
        self.turns.clear()

    def messages(self) -> list[dict[str, str]]:
        """The request for the last turn: system prompt, remembered turns, the last question."""
        messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        for turn in self.turns[:-1]:
            if turn.remembered:
                messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]
        return messages + [{"role": "user", "content": turn.user} for turn in self.turns[-1:]]
