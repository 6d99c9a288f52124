"""The environment ``bfcl``: the multi-turn tasks of the Berkeley Function Calling Leaderboard, v4.

A task is ``{"id": "multi_turn_base_17"}``. A scripted user makes one to seven requests, each after
the answer to the one before, and the tools are those of one or two of eight simulated APIs (a file
system, a travel agency, a car, ...). Nothing leaves the process.

**The reward** is 1 if every turn was right, else 0, by the rules of the package
(``multi_turn_checker`` of bfcl-eval 2026.3): after a turn the APIs must be in the state into which
the reference calls bring them, what those calls return must have been returned to the policy by
then, in any order, and at least one call must have been made. A turn without reference calls, in
which something that is needed is missing, is not checked itself: what was changed in it shows in
the next one. After the first wrong turn the reward can only be 0, so the episode ends there.

``miss_func`` withholds tools until a turn in which the user hands them out. The tools of a prompt
are fixed, so that turn's message has their schemas.

Mended here: the types of the schemas, which are Python's; ``close_ticket``, which a reference call
gives a string; and ``miss_func_49``, which withholds a tool that an earlier turn needs.

The package runs calls by ``eval`` of the model's text. Here a call is looked up among the tools
and given its arguments, and reference calls are read by ``ast``. Arguments that would make the
interpreter compute for ever (``9 ** 10**9``) are refused.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.resources
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.gyms.packages import drawn, imported
from libra_cli.envs.protocol import Message, Task, ToolCall, ToolFailed, ToolSchema

INSTALL = "pip install 'libra-rl[bfcl]' && pip install --no-deps bfcl-eval"
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
MORE_TOOLS = "I have updated some more functions you can choose from. What about now?"
"""What the package's own user says when it hands tools out (``default_prompts.py``)."""
LARGEST_COUNT = 1_000
"""The largest precision, exponent or number of decimals in magnitude; the tasks need 50."""

_COUNTS = frozenset(("precision", "exponent", "decimal_places"))
_JSON_TYPES: Mapping[str, Any] = {"dict": "object", "float": "number", "tuple": "array"}


class Bfcl:
    """The environment of one task of BFCL's multi-turn categories.

    ``categories`` are those that ``task`` draws from, and have no effect with a tasks file.

    Raises:
        EnvironmentBroken: bfcl-eval is not installed, or there is no such category.
    """

    def __init__(self, categories: Sequence[str] = CATEGORIES) -> None:
        imported("mpmath", INSTALL)
        unknown = sorted(set(categories) - set(CATEGORIES))
        if unknown or not categories:
            raise EnvironmentBroken(
                f"bfcl has no categories {', '.join(unknown) or 'if none are named'}",
                hint=f"it has: {', '.join(CATEGORIES)}",
            )
        self._ids = tuple(name for category in categories for name in _tasks(category))
        self._apis = _Apis({})
        self._truth = _Apis({})
        self._schemas: dict[str, ToolSchema] = {}
        self._withheld: Mapping[str, int] = {}
        self._requests: Sequence[list[Message]] = ()
        self._reference: Sequence[Sequence[ToolCall]] = ()
        self._turn = 0
        self._calls_in_turn = 0
        self._returned: Counter[str] = Counter()
        self._wrong = False

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The schemas of the APIs, without those that are still withheld."""
        return tuple(
            schema
            for name, schema in self._schemas.items()
            if self._withheld.get(name, 0) <= self._turn
        )

    def task(self, index: int, seed: int) -> Task:
        """Draw a task; as many in a row as there are contain each once."""
        return {"id": self._ids[drawn(index, seed, len(self._ids))]}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Begin with the user's first request.

        Raises:
            ValueError: there is no such task.
        """
        entry = _entry(task)
        self._apis, self._truth = _Apis(entry), _Apis(entry)
        self._schemas = {
            schema["function"]["name"]: schema
            for name in entry["involved_classes"]
            for schema in _schemas(name)
        }
        self._withheld = _withheld(entry)
        self._requests = entry["question"]
        self._reference = reference_calls(task)
        return [*self._requests[0]]

    def step(self, call: ToolCall) -> str:
        """Run a call; ToolFailed if the API raises."""
        if call.name not in {tool["function"]["name"] for tool in self.tools}:
            raise ToolFailed(f"there is no tool {call.name!r}")
        self._calls_in_turn += 1
        text, failed = self._apis.run(call)
        self._returned[text] += 1
        if failed:
            raise ToolFailed(text)
        return text

    def reply(self, text: str) -> list[Message] | None:
        """Check the turn that an answer ends, and return the user's next request."""
        self._wrong = not self._turn_is_right()
        self._turn += 1
        self._calls_in_turn = 0
        if self._wrong or self._turn == len(self._requests):
            return None
        if self._requests[self._turn]:
            return [*self._requests[self._turn]]
        names = (name for name, turn in self._withheld.items() if turn == self._turn)
        schemas = [self._schemas[name]["function"] for name in names]
        return [{"role": "user", "content": f"{json.dumps(schemas)}\n{MORE_TOOLS}"}]

    def score(self, answer: str) -> float:
        """Return 1 if every turn was right, else 0."""
        return float(not self._wrong and 0 < len(self._requests) == self._turn)

    def metrics(self) -> Mapping[str, float]:
        """Return the share of turns that were right before the first wrong one."""
        return {"right_turns": (self._turn - self._wrong) / max(1, len(self._requests))}

    def _turn_is_right(self) -> bool:
        expected = self._reference[self._turn]
        if not expected:
            return True
        results = Counter(self._truth.run(call)[0] for call in expected)
        seen = results <= self._returned
        return bool(self._calls_in_turn) and seen and self._apis.state() == self._truth.state()


class _Apis:
    """The simulated APIs of one task, in their state."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        long_context = "long_context" in entry.get("id", "")
        self._objects = [
            _api(name, entry["initial_config"], long_context)
            for name in entry.get("involved_classes", ())
        ]

    def run(self, call: ToolCall) -> tuple[str, bool]:
        """Return what a call returns, as the package words it, and whether it raised."""
        for name in _COUNTS & call.arguments.keys():
            count = call.arguments[name]
            if isinstance(count, int | float) and abs(count) > LARGEST_COUNT:
                return f"Error during execution: {name} is at most {LARGEST_COUNT}", True
        found = next(one for one in self._objects if hasattr(one, call.name))
        try:
            result = getattr(found, call.name)(**copy.deepcopy(dict(call.arguments)))
            return _worded(result), False
        except Exception as error:  # noqa: BLE001  whatever the API raises is what the model reads
            return f"Error during execution: {error}", True

    def state(self) -> list[dict[str, Any]]:
        """Return the public attributes of every API, which the package compares."""
        return [
            {name: value for name, value in vars(one).items() if not name.startswith("_")}
            for one in self._objects
        ]


def reference_calls(task: Task) -> Sequence[Sequence[ToolCall]]:
    """Return the calls of the ground truth, turn by turn, all with named arguments.

    Raises:
        ValueError: there is no such task.
    """
    entry = _entry(task)
    names = {
        schema["function"]["name"]: tuple(schema["function"]["parameters"]["properties"])
        for api in entry["involved_classes"]
        for schema in _schemas(api)
    }
    truth = _truths(_category(entry["id"]))[entry["id"]]
    return [[_call(text, names) for text in turn] for turn in truth]


def _call(text: str, parameters: Mapping[str, Sequence[str]]) -> ToolCall:
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"not a call: {text}")
    named = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
    places = (ast.literal_eval(value) for value in call.args)
    return ToolCall(
        call.func.id, {**dict(zip(parameters[call.func.id], places, strict=False)), **named}
    )


def _worded(result: object) -> str:
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            pass  # it holds an object of the API, or a number of mpmath
    return str(result)


def _api(name: str, configuration: Mapping[str, Any], long_context: bool) -> Any:
    known = imported("bfcl_eval.constants.executable_backend_config", INSTALL)
    api = getattr(imported(known.CLASS_FILE_PATH_MAPPING[name], INSTALL), name)()
    if name not in known.STATELESS_CLASSES:
        api._load_scenario(copy.deepcopy(configuration.get(name, {})), long_context=long_context)
    return api


def _entry(task: Task) -> Mapping[str, Any]:
    name = task.get("id")
    entry = _tasks(_category(name)).get(name) if isinstance(name, str) else None
    if entry is None:
        raise ValueError(
            f"a task is {{'id': 'multi_turn_base_0'}} or another of bfcl, not {task!r}"
        )
    return entry


def _category(name: str) -> str:
    return name.removeprefix("multi_turn_").rpartition("_")[0]


@functools.lru_cache(maxsize=len(CATEGORIES))
def _tasks(category: str) -> Mapping[str, Mapping[str, Any]]:
    return {} if category not in CATEGORIES else _by_id(f"BFCL_v4_multi_turn_{category}.json")


@functools.lru_cache(maxsize=len(CATEGORIES))
def _truths(category: str) -> Mapping[str, list[list[str]]]:
    rows = _by_id(f"possible_answer/BFCL_v4_multi_turn_{category}.json")
    return {name: row["ground_truth"] for name, row in rows.items()}


@functools.cache
def _schemas(api: str) -> Sequence[ToolSchema]:
    known = imported("bfcl_eval.constants.executable_backend_config", INSTALL)
    rows = _rows(f"multi_turn_func_doc/{known.MULTI_TURN_FUNC_DOC_FILE_MAPPING[api]}")
    return [_schema(row["name"], row["description"], row["parameters"]) for row in rows]


def _schema(name: str, description: str, parameters: Mapping[str, Any]) -> ToolSchema:
    mended = _mended(parameters)
    if name == "close_ticket":
        mended["properties"]["ticket_id"]["type"] = ["integer", "string"]
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": mended},
    }


def _withheld(entry: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the turn from which on each withheld tool may be called."""
    reference = reference_calls(entry)
    return {
        name: int(turn)
        for turn, names in entry.get("missed_function", {}).items()
        for name in names
        if not any(call.name == name for calls in reference[: int(turn)] for call in calls)
    }


def _mended(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with the types of JSON in place of Python's."""
    mended = dict(schema)
    if "type" in schema:
        mended["type"] = _JSON_TYPES.get(schema["type"], schema["type"])
    if "properties" in schema:
        mended["properties"] = {key: _mended(one) for key, one in schema["properties"].items()}
    if "items" in schema:
        mended["items"] = _mended(schema["items"])
    return mended


def _by_id(path: str) -> dict[str, Any]:
    return {row["id"]: row for row in _rows(path)}


def _rows(path: str) -> list[dict[str, Any]]:
    package = imported("bfcl_eval", INSTALL)
    file = importlib.resources.files(package) / "data" / path
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
