"""Has roles of an environment played by models that are not trained.

    environment:
      name: opponents
      args:
        environment: openspiel
        args: {game: kuhn_poker}
        opponents: {player_1: {served: earlier}}

``environment`` is an environment with roles, and ``args`` are its own. The policy plays the roles
that ``opponents`` does not name; between its turns the models of the others speak, by Chat
Completions, and nothing that they say is trained on. A list of models is a league: which of them
plays is drawn by the task, so that all members of a group meet the same one.
"""

from __future__ import annotations

import inspect
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from libra_cli.config.errors import EnvironmentBroken, did_you_mean
from libra_cli.envs import registry
from libra_cli.envs.chat_model import ChatModel, chat_model_of
from libra_cli.envs.protocol import Finished, Message, NextTurn, Reply, Task, ToolCall

NAME = "opponents"
_MEMBERS = ("task", "reset", "step", "reply", "score", "metrics", "close")
"""Members of an environment, none of which may be awaited here."""
MOST_TURNS = 1000
"""Turns of opponents in a row after which an environment is taken to have no end."""


class _Opponent:
    """A role and the model that plays it in this episode."""

    def __init__(self, role: str, model: ChatModel, seed: int) -> None:
        self.role = role
        self.conversation: list[Message] = []
        self._model = model
        self._seed = seed

    def speak(self, messages: Sequence[Message]) -> str:
        """Return what the model says when it has read the messages too. Raises EnvironmentBroken.

        Requests of one episode have different seeds, and the same ones when it is played again.
        """
        self.conversation += messages
        seed = self._seed + len(self.conversation)
        said = self._model.ask(self.conversation, whole=False, seed=seed)
        text = str(said["content"]).rpartition("</think>")[2].strip()  # nothing is no move either
        self.conversation.append({"role": "assistant", "content": text})
        return text


class WithOpponents:
    """An environment with roles, some of which the models of ``opponents`` play.

    Raises:
        EnvironmentBroken: there is no such role, the policy has none left, the environment's
            members are awaited, or a model's keys are wrong.
    """

    def __init__(
        self,
        environment: str,
        opponents: Mapping[str, Any],
        args: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        run_directory: str | None = None,
    ) -> None:
        arguments = dict(args or {})
        if secrets and registry.takes(registry.find(environment), "secrets"):
            arguments["secrets"] = secrets
        self._inner: Any = registry.maker(environment, arguments, run_directory)()
        every = tuple(getattr(self._inner, "roles", ()))
        self.roles = tuple(role for role in every if role not in opponents)
        _check(environment, self._inner, every, opponents)
        self._models = {
            role: [
                chat_model_of(one, secrets or {}, environment=NAME, argument=f"opponents.{role}")
                for one in (given if isinstance(given, list | tuple) else [given])
            ]
            for role, given in opponents.items()
        }
        self._playing: dict[str, _Opponent] = {}
        self._spoke_last = ""
        """What an opponent said, if it spoke after the policy did."""
        self._scores: dict[str, float] = {}

    @property
    def tools(self) -> Any:
        """The tools of the policy's roles. Raises EnvironmentBroken if an opponent has some."""
        tools = self._inner.tools
        if not isinstance(tools, Mapping):
            return tools
        theirs = [role for role in self._models if tools.get(role)]
        if theirs:
            raise EnvironmentBroken(f"{', '.join(theirs)}: opponents use no tools")
        return {role: tools.get(role, ()) for role in self.roles}

    def task(self, index: int, seed: int) -> Task:
        """Make a task of the environment."""
        task: Task = self._inner.task(index, seed)
        return task

    def reset(self, task: Task, seed: int) -> Any:
        """Begin the task, and play until it is the policy's turn."""
        drawn = random.Random(json.dumps(task, sort_keys=True, default=str))  # not by the member
        self._playing = {
            role: _Opponent(role, drawn.choice(models), seed)
            for role, models in self._models.items()
        }
        return self._played(self._inner.reset(task, seed))

    def step(self, call: ToolCall) -> Any:
        """Run a tool of the environment, and play on if that passes the turn to an opponent."""
        self._spoke_last = ""
        said = self._inner.step(call)
        played = self._played(said)
        return replace(played, text=said.text) if isinstance(said, NextTurn) else played

    def reply(self, text: str) -> Any:
        """Say what the policy says, and play until it is its turn again."""
        self._spoke_last = ""
        return self._played(self._inner.reply(text))

    def score(
        self, answer: str, conversation: Mapping[str, Sequence[Message]]
    ) -> Mapping[str, float]:
        """Return the rewards of the policy's roles."""
        score = self._inner.score
        told = dict(conversation) | {
            role: opponent.conversation for role, opponent in self._playing.items()
        }
        more = {"conversation": told} if registry.takes(score, "conversation") else {}
        self._scores = dict(score(self._spoke_last or answer, **more))
        return {role: self._scores[role] for role in self.roles}

    def metrics(self) -> dict[str, float]:
        """Return the environment's own metrics, and what the opponents have scored."""
        own = getattr(self._inner, "metrics", None)
        scored = {f"reward/{role}": self._scores[role] for role in self._playing}
        return {**(own() if callable(own) else {}), **scored}

    def close(self) -> None:
        """Close the environment, if it has ``close``."""
        if callable(close := getattr(self._inner, "close", None)):
            close()

    def _played(self, said: Any) -> Any:
        """Let opponents speak until it is the policy's turn, or the episode is over."""
        earned: defaultdict[str, float] = defaultdict(float)
        for _ in range(MOST_TURNS):
            if not isinstance(said, NextTurn):
                return said
            for role, reward in said.rewards.items():
                earned[role] += reward
            opponent = None if said.done else self._playing.get(said.role)
            if opponent is None:
                mine = {role: reward for role, reward in earned.items() if role in self.roles}
                return replace(said, rewards=mine)
            said = self._spoken(opponent, said.messages)
        raise EnvironmentBroken(f"opponents spoke {MOST_TURNS} times, and never the policy")

    def _spoken(self, opponent: _Opponent, messages: Sequence[Message]) -> NextTurn:
        """Have an opponent speak, and return what follows as the turn of whoever is next."""
        text = self._spoke_last = opponent.speak(messages)
        try:
            said = self._inner.reply(text)
        except Finished:  # with its reward, which is the opponent's
            return NextTurn(done=True)
        if isinstance(said, NextTurn):
            return said
        if isinstance(said, Reply):
            return NextTurn(opponent.role, said.messages, done=said.done)
        return NextTurn(opponent.role, said) if said is not None else NextTurn(done=True)


def _check(
    environment: str, inner: Any, every: Sequence[str], opponents: Mapping[str, Any]
) -> None:
    if not every:
        raise EnvironmentBroken(
            f"environment {environment!r} has no roles, so that nobody can be its opponent",
            hint="libra help multi-agent says how an environment has some",
        )
    for role in opponents:
        if role not in every:
            raise EnvironmentBroken(
                f"environment {environment!r} has no role {role!r}{did_you_mean(role, every)}",
                hint=f"opponents: some of {', '.join(every)}",
            )
    if len(opponents) == len(every) or not opponents:
        raise EnvironmentBroken(
            "opponents must leave a role to the policy, and name one",
            hint=f"opponents: some of {', '.join(every)}",
        )
    if any(inspect.iscoroutinefunction(getattr(inner, name, None)) for name in _MEMBERS):
        raise EnvironmentBroken(
            f"environment {environment!r} is awaited, and opponents are for those that are not"
        )
