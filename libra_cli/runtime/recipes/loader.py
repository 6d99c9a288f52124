"""Loads a recipe file, or reports all its problems at once as ``path:line: key: reason``.

Each step adds to one list of problems instead of stopping:

1. ``yaml_lines`` parses the YAML to plain values and the line of every key.
2. ``${NAME}`` is replaced, in ``environment.secrets``, ``agent.secrets`` and ``teacher.api_key``
   only; nothing else is accepted there, so that no secret is ever written in a recipe.
3. Ranges of hosts are expanded; a problem keeps the line of the range.
4. The models of ``config.recipe`` check types, ranges and unknown keys, strictly: ``"8"`` is not a
   number.
5. Wrong values are put aside and the rules between fields are checked on the rest, so that a typing
   error does not hide a rule that is broken elsewhere. A rule about a wrong field is not checked.
6. The plug-ins that it names are found, and the initial plan is made once, so that a bucket that
   no slot can serve has a line too.
"""

from __future__ import annotations

import copy
import json
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

import libra_cli
from libra_cli.config.algorithms import ADVANTAGES, LOSSES
from libra_cli.config.environment import AgentSpec, EnvironmentSpec, EvaluationSpec
from libra_cli.config.errors import PluginError, RecipeError, did_you_mean
from libra_cli.config.host_ranges import expand_range
from libra_cli.config.other_names.names import OTHER_NAMES
from libra_cli.config.problems import Problem, RuleError
from libra_cli.config.recipe import Recipe
from libra_cli.config.rules import ALGORITHM_RULES, held_out_problems
from libra_cli.config.secrets import holds_token
from libra_cli.config.training import TrainingSpec
from libra_cli.core.algorithms.rules import algorithm_problems
from libra_cli.core.launch.placement import PlanError, initial_plan
from libra_cli.core.launch.rollout_backend import ROLLOUT_BACKENDS
from libra_cli.core.launch.trainer_backend import TRAINER_BACKENDS
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.envs.agents.workplace import missing_program
from libra_cli.envs.paths import absolute
from libra_cli.envs.registry import ENVIRONMENTS
from libra_cli.plugins.finding import check, find
from libra_cli.runtime.monitors.protocol import MONITORS
from libra_cli.runtime.recipes.yaml_lines import Loc, NotYaml, read_yaml

_SECRET = re.compile(r"^\$\{([A-Za-z_][A-Za-z0-9_]*)\}$")
_LIKE_A_SECRET = re.compile(r"\$\{[^}]*\}")
_HUB_NAME = re.compile(r"^[\w-][\w.-]*/[\w.-]+$")
_API_KEY: Loc = ("teacher", "api_key")
_STAND_INS: dict[str, Any] = {"model": {"path": "x"}, "nodes": [{"host": "x", "slots": 2}]}
"""Values that replace missing or wrong ones without a default, while the rest is checked."""


@dataclass(slots=True)
class _Draft:
    """The problems found in a file so far. ``lines`` maps the place of a key to its line."""

    path: str
    lines: dict[Loc, int] = field(default_factory=dict)
    problems: dict[tuple[int, str, str], None] = field(default_factory=dict)
    origin: list[int] = field(default_factory=list)
    """For each node after expansion, the index of the entry in the file that it comes from."""
    wrong: list[Loc] = field(default_factory=list)
    """Places of the expanded recipe in which something was wrong."""
    singles: set[str] = field(default_factory=set)
    """Sections that the file has once, where there may be a list of them."""

    def line(self, loc: Loc) -> int:
        """Return the line of a place, or of the nearest place around it that the file has."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return self.lines.get(loc, 1)

    def written(self, loc: Loc) -> Loc:
        """Return the place in the file of a place after expansion."""
        if loc[:1] in (("environment",), ("evaluation",)):
            return self._written_of_listed(loc)
        if len(loc) > 1 and loc[0] == "nodes" and isinstance(loc[1], int) and self.origin:
            return ("nodes", self.origin[loc[1]], *loc[2:])
        return loc

    def _written_of_listed(self, loc: Loc) -> Loc:
        place = (loc[0], *loc[2:]) if loc[0] in self.singles and loc[1:2] == (0,) else loc
        at = place.index("tasks") if "tasks" in place else len(place)
        if len(place) > at + 1 and place[: at + 2] not in self.lines:
            return place[: at + 1] + place[at + 2 :]  # one source, which is no list in the file
        return place

    def add(self, loc: Loc, reason: str) -> None:
        """Add a problem at a place in the file, once."""
        self.problems.setdefault((self.line(loc), _key(loc), reason))

    def note(self, loc: Loc, reason: str) -> None:
        """Add a problem at a place after expansion, and mark the place as wrong."""
        self.add(self.written(loc), reason)
        self.wrong.append(loc)

    def error(self) -> RecipeError:
        """Return all problems as one error, in the order of the file."""
        lines = [
            f"{self.path}:{line}: {key}: {reason}" if key else f"{self.path}:{line}: {reason}"
            for line, key, reason in sorted(self.problems, key=lambda problem: problem[:2])
        ]
        what = "the problem" if len(lines) == 1 else f"the {len(lines)} problems"
        return RecipeError(
            "\n".join(lines), hint=f"fix {what}, then: libra run --dry-run {self.path}"
        )


def load_recipe(
    path: Path, environ: Mapping[str, str] | None = None, *, plays: bool = True
) -> Recipe:
    """Load a recipe file.

    A missing ``recipes/...`` is looked up among the recipes that came with libra. ``environ``
    replaces the environment variables of this process. The program of its agents need not be here
    for who only asks its hosts: ``plays`` is false.

    Raises:
        RecipeError: the file cannot be read, or the recipe is wrong; with a line for each problem.
    """
    shipped = Path(libra_cli.__file__).parent / path
    if path.parts[:1] == ("recipes",) and not path.exists() and shipped.is_file():
        path = shipped
    draft = _Draft(str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"{path}: cannot be read: {error.strerror}", hint="libra init writes recipe.yaml"
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    data = _parse(text, draft)
    _rename_loss(data)
    _list_sections(data, draft)
    _read_secrets(data, draft, os.environ if environ is None else environ)
    _expand_nodes(data, draft)
    _resolve_tasks(data, draft, path)
    _resolve_arguments(data, path)
    _resolve_planner_files(data, path)
    _resolve_agent(data, draft, path)
    _check_model_paths(data, draft)
    _hold_the_longest(data)
    recipe = _validate(data, draft, plays=plays)
    if recipe is None or draft.problems:
        raise draft.error()
    return recipe


def _parse(text: str, draft: _Draft) -> dict[str, Any]:
    try:
        document = read_yaml(text)
    except NotYaml as error:
        draft.lines[()] = error.line
        draft.add((), str(error))
        raise draft.error() from error
    draft.lines = document.lines
    for line, place, reason in document.problems:
        draft.problems.setdefault((line, _key(place), reason))
    if not isinstance(document.value, dict):
        draft.add((), f"must hold keys such as run, nodes and model, got {_show(document.value)}")
        raise draft.error()
    return document.value


def _list_sections(data: dict[str, Any], draft: _Draft) -> None:
    """Make lists of sections of which there may be several."""
    for key in ("environment", "evaluation"):
        if data.get(key) is not None and not isinstance(data[key], list):
            data[key] = [data[key]]
            draft.singles.add(key)


def _read_secrets(data: dict[str, Any], draft: _Draft, environ: Mapping[str, str]) -> None:
    for loc, text in list(_strings(data, ())):
        if _is_secret(loc) and (loc == _API_KEY or loc[-2] == "secrets"):
            _read_secret(data, loc, text, draft, environ)
        elif found := _LIKE_A_SECRET.search(text):
            draft.add(draft.written(loc), f"{found[0]} is only replaced in {_secrets_of(loc)}")
        elif holds_token(text):
            where = f"write ${{VARIABLE}} in {_secrets_of(loc)} instead"
            draft.add(draft.written(loc), f"holds a secret, which a recipe must not; {where}")


def _is_secret(loc: Loc) -> bool:
    """Whether a place is ``environment[n].secrets``, ``agent.secrets`` or the teacher's key, or in
    it.

    An evaluation may have an environment of its own.
    """
    if loc[:1] == ("environment",):
        return loc[2:3] == ("secrets",)
    if loc[:1] == ("evaluation",):
        return loc[2:4] == ("environment", "secrets")
    return loc[:2] in (("agent", "secrets"), _API_KEY)


def _secrets_of(loc: Loc) -> str:
    if loc[0] == "teacher":
        return "teacher.api_key"
    return "agent.secrets" if loc[0] == "agent" else "environment.secrets"


def _read_secret(
    data: dict[str, Any], loc: Loc, text: str, draft: _Draft, environ: Mapping[str, str]
) -> None:
    match = _SECRET.match(text)
    secrets: Any = data
    for part in loc[:-1]:
        secrets = secrets[part]
    name, place = loc[-1], draft.written(loc)
    # Right or wrong, the text itself never reaches a model, a message or a log.
    secrets[name] = ""
    if match is None:
        draft.add(place, "must be ${VARIABLE}: a secret does not belong in a recipe")
    elif match[1] not in environ:
        draft.add(place, f"the environment has no {match[1]}; type: export {match[1]}=...")
    elif not environ[match[1]]:
        draft.add(place, f"{match[1]} is empty in the environment; type: export {match[1]}=...")
    else:
        secrets[name] = environ[match[1]]


def _strings(value: Any, loc: Loc) -> Iterator[tuple[Loc, str]]:
    if isinstance(value, str):
        yield loc, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(item, (*loc, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, (*loc, index))


def _expand_nodes(data: dict[str, Any], draft: _Draft) -> None:
    nodes = data.get("nodes")
    if not isinstance(nodes, list):
        return
    expanded: list[Any] = []
    for index, node in enumerate(nodes):
        draft.origin.append(index)
        copies = [node]
        if isinstance(node, dict):
            try:
                copies = _expand_node(node)
            except _BadRange as error:
                draft.note(("nodes", len(expanded), error.key), str(error))
                draft.wrong.append(("nodes", len(expanded), "host"))
                copies = [node | {"host": f"range-{index}", "address": None}]
        expanded += copies
        draft.origin += [index] * (len(copies) - 1)
    data["nodes"] = expanded


class _BadRange(ValueError):
    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


def _expand_node(node: dict[str, Any]) -> list[dict[str, Any]]:
    hosts = _expand(node, "host")
    addresses = _expand(node, "address")
    if addresses == [node.get("address")]:
        addresses *= len(hosts)
        if len(hosts) > 1 and addresses[0] is not None:
            raise _BadRange("address", f"is one address, but host names {len(hosts)} hosts")
    if len(addresses) != len(hosts):
        raise _BadRange("address", f"names {len(addresses)} addresses, but host names {len(hosts)}")
    if len(hosts) == 1 and hosts == [node.get("host")] and addresses == [node.get("address")]:
        return [node]
    return [
        copy.deepcopy(node) | {"host": host, "address": address}
        for host, address in zip(hosts, addresses, strict=True)
    ]


def _expand(node: dict[str, Any], key: str) -> list[Any]:
    text = node.get(key)
    if not isinstance(text, str) or not ("[" in text or "]" in text):
        return [text]
    try:
        return [*expand_range(text)]
    except ValueError as error:
        raise _BadRange(key, str(error)) from error


def _resolve_tasks(data: dict[str, Any], draft: _Draft, path: Path) -> None:
    """Make the paths of tasks absolute, and what names them a list of mappings."""
    if data.get("demonstrations") is not None:
        given = data["demonstrations"]
        data["demonstrations"] = _sources(given, ("demonstrations",), draft, path)
    for loc, section in _with_tasks(data):
        given, place = section.get("tasks"), (*loc, "tasks")
        if given is not None:
            section["tasks"] = _sources(given, place, draft, path)
        elif "environment" in loc and section.get("name") == "dataset":
            reason = "dataset has none of its own; name a file, as in tasks: tasks.jsonl"
            draft.add(draft.written(place), reason)


def _with_tasks(data: dict[str, Any]) -> Iterator[tuple[Loc, dict[str, Any]]]:
    """Environments and evaluations, which may name files of tasks, with their places."""
    for key in ("environment", "evaluation"):
        sections = data.get(key)
        for index, section in enumerate(sections if isinstance(sections, list) else ()):
            if not isinstance(section, dict):
                continue
            yield (key, index), section
            inner = section.get("environment")
            if key == "evaluation" and isinstance(inner, dict):
                yield (key, index, "environment"), inner


def _sources(given: Any, loc: Loc, draft: _Draft, path: Path) -> list[Any]:
    sources = given if isinstance(given, list) else [given]
    sources = [{"path": source} if isinstance(source, str) else source for source in sources]
    for number, source in enumerate(sources):
        if not isinstance(source, dict) or not isinstance(source.get("path"), str):
            continue
        file = path.parent / Path(source["path"]).expanduser()
        if not file.exists():
            where = (*loc, number) if isinstance(given, list) else loc
            draft.add(draft.written(where), f"there is no file {file}")
        source["path"] = str(file.resolve())
    return sources


def _resolve_arguments(data: dict[str, Any], path: Path) -> None:
    """Make the paths among the arguments of environments absolute."""
    for _, section in _with_tasks(data):
        name, arguments = section.get("name"), section.get("args")
        if isinstance(name, str) and isinstance(arguments, dict):
            section["args"] = absolute(name, arguments, path.parent)


def _rename_loss(data: dict[str, Any]) -> None:
    """What the old key ``algorithm`` called grpo has the name that it has elsewhere."""
    training = data.get("training")
    if isinstance(training, dict) and training.get("algorithm") == "grpo":
        training["algorithm"] = "dapo"


def _resolve_planner_files(data: dict[str, Any], path: Path) -> None:
    """A profile or trace that lies beside the recipe; anything else is a shipped one's name."""
    planner = data.get("planner")
    if not isinstance(planner, dict):
        return
    for key in ("profile", "trace"):
        name = planner.get(key)
        if isinstance(name, str) and (file := path.parent / Path(name).expanduser()).is_file():
            planner[key] = str(file.resolve())


def _resolve_agent(data: dict[str, Any], draft: _Draft, path: Path) -> None:
    agent = data.get("agent")
    directory = agent.get("directory") if isinstance(agent, dict) else None
    if not isinstance(directory, str):
        return
    found = path.parent / Path(directory).expanduser()
    if not found.is_dir():
        draft.add(("agent", "directory"), f"there is no directory {found}")
    data["agent"]["directory"] = str(found.resolve())


def _check_model_paths(data: dict[str, Any], draft: _Draft) -> None:
    """Refuse names on the hub and relative paths, since hosts load models from their own disk."""
    models: list[tuple[Loc, Any]] = [(("model",), data.get("model"))]
    if isinstance(served := data.get("models"), list):
        models += [(("models", number), one) for number, one in enumerate(served)]
    for place, section in models:
        path = section.get("path") if isinstance(section, dict) else None
        if not isinstance(path, str) or path.startswith(("/", "~")):
            continue
        reason = f"{path!r} is no absolute path on the hosts"
        if _HUB_NAME.match(path):
            name = path.partition("/")[2]
            reason += (
                f", and a run downloads nothing: hf download {path} --local-dir /models/{name}"
            )
        draft.add((*place, "path"), reason)


def _hold_the_longest(data: dict[str, Any]) -> None:
    """Let a forward pass hold model.max_len tokens where nothing says how much it holds."""
    usual = TrainingSpec().micro_batch_tokens
    match data:
        case {"model": {"max_len": int(longest)}} if longest > usual:
            training = data.setdefault("training", {})
            if isinstance(training, dict):
                training.setdefault("micro_batch_tokens", longest)
        case _:
            pass


def _validate(data: dict[str, Any], draft: _Draft, *, plays: bool) -> Recipe | None:
    """Check, put wrong values aside, check again: at most one pass for each level of models."""
    data = copy.deepcopy(data)
    recipe: Recipe | None = None
    context = {ALGORITHM_RULES: _algorithm_problems}
    for _ in range(4):
        try:
            # JSON because pydantic's strict mode still takes a list for a tuple there.
            recipe = Recipe.model_validate_json(json.dumps(data), strict=True, context=context)
            break
        except ValidationError as error:
            if not _note(error, data, draft):
                return None
    if recipe is not None:
        agent = recipe.agent if plays else None
        seen = held_out_problems(recipe.environment, recipe.evaluation) if plays else ()
        named = (*_plugin_problems(recipe), *_program_problems(agent), *seen)
        _note_rules(named or _plan_problems(recipe), draft)
    return recipe


def _algorithm_problems(recipe: Recipe) -> Iterator[Problem]:
    """The broken rules of what the recipe learns by. A name that leads nowhere is told of with the
    other plug-ins."""
    with suppress(PluginError):
        yield from algorithm_problems(recipe, find)


def _plugin_problems(recipe: Recipe) -> Iterator[Problem]:
    """The names of plug-ins that lead nowhere.

    Those that decide here are imported. A loss is not, since it may need torch, nor are monitors.
    """
    imported = [
        ("rollout.backend", ROLLOUT_BACKENDS, recipe.rollout.backend),
        ("training.advantage", ADVANTAGES, recipe.training.advantage),
        ("training.backend", TRAINER_BACKENDS, recipe.training.backend),
        ("scheduler.policy", POLICIES, recipe.scheduler.policy),
    ]
    looked_up = [("training.loss", LOSSES, recipe.training.loss)]
    looked_up += [("run.monitors", MONITORS, name) for name in recipe.run.monitors]
    environments = _environment_names(recipe.environment, recipe.evaluation)
    looked_up += [(key, ENVIRONMENTS, name) for key, name in environments]
    lookups = [(find, *one) for one in imported] + [(check, *one) for one in looked_up]
    for look_up, key, group, name in lookups:
        try:
            look_up(group, name)
        except PluginError as error:
            yield Problem((key,), f"{error} ({error.hint})")


def _environment_names(
    environments: Sequence[EnvironmentSpec], evaluations: Sequence[EvaluationSpec]
) -> Iterator[tuple[str, str]]:
    """Yield the names of environments, which are not imported before the plan is told."""
    for index, environment in enumerate(environments):
        yield f"environment[{index}].name", environment.name
    for index, evaluation in enumerate(evaluations):
        if evaluation.environment is not None:
            yield f"evaluation[{index}].environment.name", evaluation.environment.name


def _program_problems(agent: AgentSpec | None) -> Iterator[Problem]:
    """Yield that a command's program is not here, where its agents run; elsewhere hosts say it."""
    if agent is None or agent.command is None or agent.nodes or agent.in_sandbox:
        return
    if missing := missing_program(agent.command, agent.directory):
        reason = f"there is no program {missing!r} on this machine; name it by its path"
        yield Problem(("agent.command",), reason)


def _plan_problems(recipe: Recipe) -> tuple[Problem, ...]:
    try:
        initial_plan(recipe)
    except PlanError as error:
        return (error.problem,)
    return ()


def _note(error: ValidationError, data: dict[str, Any], draft: _Draft) -> bool:
    """Add the problems that pydantic found; tell whether another pass makes sense."""
    removed = False
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, RuleError):
            _note_rules(cause.problems, draft)
            continue
        loc = details["loc"]
        if not any(_overlap(loc, wrong) for wrong in draft.wrong):
            draft.note(loc, _reason(details))
        removed = _put_aside(data, loc) or removed
    return removed


def _note_rules(problems: tuple[Problem, ...], draft: _Draft) -> None:
    for problem in problems:
        places = [_parse_key(key) for key in problem.keys]
        if any(_overlap(place, wrong) for place in places for wrong in draft.wrong):
            continue
        draft.add(draft.written(places[0]), problem.reason)


def _overlap(one: Loc, other: Loc) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _put_aside(data: dict[str, Any], loc: Loc) -> bool:
    """Replace a wrong value by its default or a stand-in; False if it has neither."""
    while loc and isinstance(loc[-1], int):
        loc = loc[:-1]
    parent, loc = _around(data, loc)
    if not loc:
        return False
    key = loc[-1]
    if key in _STAND_INS and len(loc) == 1:
        parent[key] = copy.deepcopy(_STAND_INS[str(key)])
    elif key == "host" and isinstance(parent, dict):
        parent[key] = f"node-{loc[1]}"
    elif _holds(parent, key):
        del parent[key]
    else:
        return False
    return True


def _around(data: Any, loc: Loc) -> tuple[Any, Loc]:
    """What a place is in, and the place; it is empty if what is around it was put aside before."""
    for depth, part in enumerate(loc[:-1]):
        if not _holds(data, part):
            return data, ()
        if not isinstance(data[part], dict | list):  # one word that stands for a mapping
            return data, loc[: depth + 1]
        data = data[part]
    return data, loc


def _holds(parent: Any, part: str | int) -> bool:
    if isinstance(parent, list):
        return isinstance(part, int) and part < len(parent)
    return part in parent


def _reason(details: ErrorDetails) -> str:
    kind, loc, context = details["type"], details["loc"], details.get("ctx", {})
    # A secret that has the wrong type is still a secret.
    got = "" if _is_secret(loc) else f", got {_show(details['input'])}"
    if kind == "extra_forbidden":
        key = str(loc[-1])
        in_section = ".".join(map(str, loc[-2:]))
        if meant := OTHER_NAMES.get(in_section) or OTHER_NAMES.get(key):
            return f"unknown key; libra's is {meant}"
        return "unknown key" + did_you_mean(key, _fields_at(loc[:-1]))
    if kind == "literal_error":
        choices = str(context["expected"])
        close = did_you_mean(str(details["input"]), re.findall(r"'([^']*)'", choices))
        return f"must be {choices}{got}{close}"
    if kind == "string_pattern_mismatch":
        user = "; a user goes in the key user" if "@" in str(details["input"]) else ""
        return f"must be a word of letters, digits and . _ -{got}{user}"
    if kind in _PLAIN_REASONS:
        return _PLAIN_REASONS[kind].format(**context, got=got)
    message = details["msg"]
    if not message.startswith("Input should be "):
        return message[0].lower() + message[1:]
    return f"must be {message.removeprefix('Input should be ')}{got}"


_PLAIN_REASONS = {
    "missing": "is missing",
    "value_error": "{error}",
    "int_type": "must be an integer{got}",
    "float_type": "must be a number{got}",
    "bool_type": "must be true or false{got}",
    "string_type": "must be a string{got}",
    "tuple_type": "must be a list{got}",
    "dict_type": "must be a mapping of keys to values{got}",
    "model_type": "must be a mapping of keys to values{got}",
    "model_attributes_type": "must be a mapping of keys to values{got}",
    "too_short": "must have at least {min_length} of them{got}",
    "too_long": "must have at most {max_length} of them{got}",
}


def _fields_at(loc: Loc) -> list[str]:
    """Return the keys that a place may have."""
    model: Any = Recipe
    for part in loc:
        if isinstance(part, int):
            continue
        model = _model_in(model.model_fields[part].annotation)
        if model is None:
            return []
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None


def _key(loc: Loc) -> str:
    key = ""
    for part in loc:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    return key


def _parse_key(key: str) -> Loc:
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key))


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
