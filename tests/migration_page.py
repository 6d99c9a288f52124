"""The tables of ``libra help migration``, made from those that ``libra import`` goes by.

``python -m tests.migration_page`` writes them into the page, under the headings of the trainers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from libra_cli.config.other_names import prime_rl, trl, verl
from libra_cli.config.other_names.rule import KeyRule, Table

PAGE = Path(__file__).parents[1] / "libra_cli/help/migration.md"
TABLES: dict[str, Sequence[Table]] = {
    "TRL": (trl.GRPO, trl.RLOO, trl.SFT),
    "verl": (verl.VERL,),
    "prime-rl": (prime_rl.RL, prime_rl.SFT),
}
SHOWN = 6
"""Keys that are left out for one reason, of which more are only counted."""


def tables(name: str) -> str:
    """Return the tables of one trainer in Markdown: what is translated, and what is left out."""
    kinds = {"RLOO": trl.RLOO, "SFT": trl.SFT, "sft": prime_rl.SFT}
    rules: dict[tuple[str, ...], tuple[KeyRule, str]] = {}
    for table in TABLES[name]:
        kind = next((word for word, one in kinds.items() if one is table), "")
        for rule in table.rules:
            if {f"trainer.{key}" for key in rule.theirs} & {key for one in rules for key in one}:
                continue  # sft has the trainer's keys at the top
            rules.setdefault((*rule.theirs, rule.how), (rule, kind))
    lines = [f"| {name} | libra | how |", "| --- | --- | --- |"]
    lines += [
        f"| {_keys(rule.theirs) or f'`{kind}Config`'} | {_keys(rule.ours)} | {_how(rule, kind)} |"
        for rule, kind in rules.values()
        if rule.why is None
    ]
    lines += ["", "| left out | why | |", "| --- | --- | --- |"]
    left = [rule for rule, _ in rules.values() if rule.why is not None]
    for rule in sorted(left, key=lambda one: str(one.why)):
        lines.append(f"| {_few(rule.theirs)} | {rule.why} | {rule.how} |")
    return "\n".join(lines) + "\n"


def _how(rule: KeyRule, kind: str) -> str:
    return f"{kind}: {rule.how}" if kind else rule.how


def _few(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return _keys(keys[:SHOWN]) + more


def _keys(keys: Sequence[str]) -> str:
    return ", ".join(f"`{key}`" for key in _shortened(keys))


def _shortened(keys: Sequence[str]) -> Iterator[str]:
    """Write a key of the section of the one before it as ``.name``, and verl's without the first
    of its sections.
    """
    section = ""
    for key in (one.removeprefix("actor_rollout_ref.") for one in keys):
        begins = key.rpartition(".")[0]
        yield f".{key.rpartition('.')[2]}" if section and begins == section else key
        section = begins


def written(text: str) -> str:
    """Return the page with the tables of all trainers as they are now."""
    for name in TABLES:
        heading = re.compile(rf"(?<=^## {name}\n)(.*?)(?:^\|.*?)?(?=^## |\Z)", re.M | re.S)
        found = heading.search(text)
        if found is not None:
            text = text[: found.start()] + _section(found[1], name) + text[found.end() :]
    return text


def _section(prose: str, name: str) -> str:
    begin = prose.strip("\n")
    return "\n" + (f"{begin}\n\n" if begin else "") + tables(name) + "\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")).rstrip("\n") + "\n", encoding="utf-8")
