"""``libra explain``: what a key of a recipe, or of ``libra status --json``, means.

The recipe's keys are read from its JSON Schema, whose descriptions are the docstrings of
``config.recipe``; the keys of status from the types of ``report.status`` and the table of the page
``status`` of ``libra help``. Nothing is told here that is not told there.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, get_args

from libra_cli.config.errors import InputError
from libra_cli.config.on_resume import mark_of, sections_of
from libra_cli.config.only_with import condition_of
from libra_cli.config.other_names.names import OTHER_NAMES
from libra_cli.config.recipe import Recipe
from libra_cli.core.json_form import hints

SCHEMA = "https://json-schema.org/draft/2020-12/schema"
_ROW = re.compile(r"^\| (?P<keys>`[^|]*) \| (?P<text>.*) \|$", re.MULTILINE)
_QUOTED = re.compile(r"`([^`]+)`")
_JOIN = "(?:, | and | / )"
_NESTED = r"\((?:[^()]|\([^()]*\))*\)"
_UNTIL = r"(?=;|\.(?: |$)|, `[\w.]+`(?:, `[\w.]+`)*(?:: | \()|$)"
_Schema = Mapping[str, Any]
_NEWEST_OF = {"plan": "plans", "decision": "decisions"}
"""Keys of status that hold one of what another holds all."""


@dataclass(frozen=True, slots=True)
class KeyMeaning:
    """What one key of a recipe or of status means."""

    key: str
    of: str
    """``recipe`` or ``status --json``, whichever has the key."""
    type: str
    default: str
    """The default as a recipe writes it; empty where the key must be given, and for status."""
    meaning: str
    keys: tuple[tuple[str, str], ...] = ()
    """The keys of a section, each with the first sentence of its meaning."""
    on_resume: str = ""
    """Whether the key of a recipe may be another when a run goes on."""
    values: tuple[str, ...] = ()
    """The words that a key of a recipe may be, where these are all it may be."""
    only_with: str = ""
    """What another key of the recipe must be, so that this one means something."""
    pages: tuple[tuple[str, str], ...] = ()
    """What the pages of ``libra help`` say with this key in it, as (topic, sentence)."""


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema of recipes, for editors that complete and check YAML.

    Editors show the description beside a key and do not look for that of what it refers to, so a
    section's key has its section's.
    """
    schema = Recipe.model_json_schema(mode="validation")
    for name, section in sections_of(Recipe).items():
        keys = (schema if section is Recipe else schema["$defs"][name])["properties"]
        for key in section.model_fields:
            keys[key]["x-on-resume"] = mark_of(section, key).words
            if condition := condition_of(section, key):
                keys[key]["x-only-with"] = condition.words
            keys[key].setdefault("description", _meaning(keys[key], schema["$defs"]))
    return {"$schema": SCHEMA, **schema}


def explain(key: str, pages: Mapping[str, str]) -> list[KeyMeaning]:
    """Return what a key means: of the recipe first, then of status. ``pages`` are those of help.

    ``training.loss``, ``nodes[].gpus`` and ``nodes.gpus`` are keys; so is the last part alone, if
    only few end with it.

    Raises:
        InputError: there is no such key; the hint names those that look like it.
    """
    known = {**status_keys(pages.get("status", "")), **recipe_keys()}
    wanted = re.sub(r"\[\d*\]", "", key).strip(".")
    found = _found("status:", wanted, known) + _found("recipe:", wanted, known)
    found = found or [one for one, told in known.items() if wanted in told.values]
    if not found:
        raise _unknown(key, sorted({one.partition(":")[2] for one in known}))
    told = [known[one] for one in reversed(found)]
    return [_with_pages(one, pages) for one in told]


def _found(kind: str, wanted: str, known: Mapping[str, KeyMeaning]) -> list[str]:
    """Return the key itself, or else the keys that end with it, those of a copy left out."""
    whole = f"{kind}{wanted}"
    ends = [one for one in known if one.startswith(kind) and one.endswith(f".{wanted}")]
    copies = tuple(f"status:{newest}." for newest in _NEWEST_OF)
    return [whole] if whole in known else [one for one in ends if not one.startswith(copies)]


def _unknown(key: str, known: Sequence[str]) -> InputError:
    near = difflib.get_close_matches(key, known, n=4, cutoff=0.5)
    last = key.rpartition(".")[2]
    if last in OTHER_NAMES:
        near.insert(0, OTHER_NAMES[last])
    near += [one for one in known if last in one and one not in near][: 4 - len(near)]
    listed = "libra explain lists the sections of a recipe"
    hint = f"did you mean {', '.join(near)}? {listed}" if near else listed
    return InputError(f"neither a recipe nor libra status --json has a key {key!r}", hint=hint)


# -- the recipe ----------------------------------------------------------------------------------


def recipe_keys() -> dict[str, KeyMeaning]:
    """Return what every key of a recipe means, by ``recipe:`` and its path."""
    schema = recipe_schema()
    found = {f"recipe:{path}": one for path, one in _walk(schema, schema["$defs"], "")}
    whole = found.pop("recipe:")
    return {**found, "recipe:recipe": whole}


def _walk(node: _Schema, definitions: _Schema, path: str) -> Iterator[tuple[str, KeyMeaning]]:
    inner = _object_in(node, definitions)
    fields: Mapping[str, _Schema] = inner.get("properties", {}) if inner else {}
    meaning = str(node.get("description") or (inner or {}).get("description", ""))
    keys = tuple(
        (name, _first_sentence(_meaning(one, definitions))) for name, one in fields.items()
    )
    yield (
        path,
        KeyMeaning(
            key=path or "recipe",
            of="recipe",
            type=_type(node),
            default=_default(node),
            meaning=meaning,
            keys=keys,
            values=tuple(_words_of(node)),
            on_resume=str(node.get("x-on-resume", "")),
            only_with=str(node.get("x-only-with", "")),
        ),
    )
    for name, one in fields.items():
        yield from _walk(one, definitions, f"{path}.{name}".strip("."))


def _object_in(node: _Schema, definitions: _Schema) -> _Schema | None:
    """The object that a key holds, in a list or beside another type, if it holds one."""
    if "$ref" in node:
        return _object_in(definitions[node["$ref"].rpartition("/")[2]], definitions)
    if "properties" in node:
        return node
    inside = [*node.get("anyOf", ()), *([node["items"]] if "items" in node else [])]
    found = (_object_in(one, definitions) for one in inside if isinstance(one, Mapping))
    return next((one for one in found if one is not None), None)


def _meaning(node: _Schema, definitions: _Schema) -> str:
    inner = _object_in(node, definitions) or {}
    return str(node.get("description") or inner.get("description", ""))


def _default(node: _Schema) -> str:
    return json.dumps(node["default"]) if "default" in node else ""


def _type(node: _Schema) -> str:
    """Write a schema's type in words, for example ``integer, at least 1``."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(one) for one in node["anyOf"]))
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
    if "const" in node:
        return str(node["const"])
    if node.get("type") == "array":
        return f"list of {_type(node.get('items', {}))}"
    return str(node.get("type", "mapping")) + _bounds(node)


def _words_of(node: _Schema) -> Iterator[str]:
    """Yield the words that a value may be, of a list or beside other types too."""
    yield from (one for one in node.get("enum", ()) if isinstance(one, str))
    for one in (*node.get("anyOf", ()), *([node["items"]] if "items" in node else [])):
        yield from _words_of(one)


def _bounds(node: _Schema) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "over",
        "maximum": "at most",
        "exclusiveMaximum": "under",
    }
    return "".join(f", {word} {node[name]:g}" for name, word in words.items() if name in node)


# -- status --------------------------------------------------------------------------------------


def status_keys(page: str) -> dict[str, KeyMeaning]:
    """Return what every key of status means, by ``status:`` and its path; ``page`` is of help."""
    from libra_cli.report.status.summary import RunSummary

    rows = [(_QUOTED.findall(row["keys"]), row["text"]) for row in _ROW.finditer(page)]
    return {
        f"status:{path}": KeyMeaning(path, "status --json", words, "", _row_of(path, rows))
        for path, words in _fields(RunSummary, "")
    }


def _fields(kind: type, path: str) -> Iterator[tuple[str, str]]:
    for name, hint in hints(kind).items():
        here = f"{path}.{name}".strip(".")
        words = getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)
        words = re.sub(r"tuple\[(.*), \.\.\.\]", r"list[\1]", words)
        kinds = (one for one in (hint, *get_args(hint)) if isinstance(one, type))
        inner = next(filter(is_dataclass, kinds), None)
        yield here, "mapping" if inner is hint else re.sub(r"\w+\.(?=\w)", "", words)
        if inner is not None:
            yield from _fields(inner, here)


def _row_of(path: str, rows: Sequence[tuple[list[str], str]]) -> str:
    """The row of the table that tells of a key, or else what a row of what it is in says of it."""
    first, _, rest = path.partition(".")
    if rest and first in _NEWEST_OF:
        path = f"{_NEWEST_OF[first]}.{rest}"
    for end in range(path.count(".") + 1, 0, -1):
        wanted = ".".join(path.split(".")[:end])
        for keys, text in rows:
            if wanted in _spelled_out(keys):
                section, _, name = path.rpartition(".")
                return _clause_of(name, text) if section == wanted else text
    first = path.split(".")[0]
    inside = (text for keys, text in rows if _spelled_out(keys)[0].split(".")[0] == first)
    return _clause_of(path.rpartition(".")[2], next(inside, ""))


def _clause_of(name: str, row: str) -> str:
    """What a row says behind the name of one of its keys, or of several, or else the whole row."""
    begins = r"(?:^|(?<=[;.,:] )|(?<=its )|(?<=called ))"
    names = rf"(?:`[\w.]+`{_JOIN})*`\.?{name}`(?:{_JOIN}`[\w.]+`)*"
    found = re.search(rf"{begins}{names}(?: {_NESTED}|: (?:{_NESTED}|[^;()])*?{_UNTIL})", row)
    return found[0] if found else row


def _spelled_out(keys: Sequence[str]) -> list[str]:
    """Write keys in full: ``lengths.mean``, ``.p99`` give ``lengths.p99``; ``[]`` is left out."""
    found: list[str] = []
    for key in keys:
        bare = key.replace("[]", "")
        if bare.startswith(".") and found:
            bare = found[0].rpartition(".")[0] + bare
        found.append(bare)
    return found


# -- pages ---------------------------------------------------------------------------------------


def _with_pages(told: KeyMeaning, pages: Mapping[str, str]) -> KeyMeaning:
    if told.of != "recipe":
        return told
    said = [
        (topic, sentence)
        for topic, text in sorted(pages.items(), key=lambda page: (page[0] == "migration", page[0]))
        for sentence in _sentences(text)
        if f"`{told.key}`" in sentence or f"`{told.key}:" in sentence
    ]
    pages_of = tuple((topic, _plain(sentence)) for topic, sentence in said[:4])
    return replace(told, pages=pages_of)


def _plain(markdown: str) -> str:
    """A sentence without links, and the cells of a table's row with semicolons between them."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", markdown)
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", text)]
    return "; ".join(cell for cell in cells if cell) if text.startswith("|") else text


def _sentences(text: str) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|#*])", prose):
        yield from re.split(r"(?<=[.;:])\s+(?=[A-Z`])", " ".join(paragraph.split()))


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]
