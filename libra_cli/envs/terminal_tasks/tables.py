"""Tasks about data: CSV, JSON and SQLite."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from random import Random
from typing import Any

from libra_cli.envs.terminal_tasks.made_task import MadeTask
from libra_cli.envs.terminal_tasks.words import CITIES, NAMES, NOUNS


def sales(rng: Random, number: int) -> MadeTask:
    """Rows of a CSV file are filtered and summed by a column."""
    column = ("city", "seller", "product")[number % 3]
    least = rng.choice((2, 3, 4))
    rows, totals = [], defaultdict[str, int](int)
    for _ in range(rng.randrange(60, 120)):
        row = {
            "city": rng.choice(CITIES[:6]),
            "seller": rng.choice(NAMES[:5]).title(),
            "product": f"{rng.choice(NOUNS[:4])}, {rng.choice(('red', 'blue'))}",
            "quantity": rng.randrange(1, 9),
            "cents": rng.randrange(100, 5000),
            "state": rng.choice(("paid", "paid", "open", "returned")),
        }
        rows.append(row)
        if row["state"] == "paid" and row["quantity"] >= least:  # type: ignore[operator]
            totals[str(row[column])] += row["quantity"] * row["cents"]  # type: ignore[operator]
    expected = [[key, f"{cents // 100}.{cents % 100:02}"] for key, cents in sorted(totals.items())]
    return MadeTask(
        f"`/app/sales.csv` has the quantity and the price of one piece, in cents, of each sale. "
        f"Of the sales whose state is `paid` and whose quantity is at least {least}, sum quantity "
        f"times price for each {column}. Write `/app/totals.csv` with the header "
        f"`{column},total`, sorted by {column}; a total is in whole units with two decimals, as "
        "`12.05`.",
        {"sales.csv": _csv(rows)},
        f"""
python3 - <<'END'
import collections, csv
totals = collections.Counter()
for row in csv.DictReader(open("sales.csv")):
    if row["state"] == "paid" and int(row["quantity"]) >= {least}:
        totals[row["{column}"]] += int(row["quantity"]) * int(row["cents"])
with open("totals.csv", "w", newline="") as out:
    writer = csv.writer(out)
    writer.writerow(["{column}", "total"])
    for key in sorted(totals):
        writer.writerow([key, "%d.%02d" % divmod(totals[key], 100)])
END
""",
        "import csv\n"
        "rows = list(csv.reader((APP / 'totals.csv').open()))\n"
        f"assert rows[0] == ['{column}', 'total'], rows[0]\nassert rows[1:] == EXPECTED, rows",
        expected,
        category="data",
    )


def _csv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def joins(rng: Random, number: int) -> MadeTask:
    """Two tables are joined: inner, with rows that have no partner, or those alone."""
    kind = ("inner", "left", "missing")[number % 3]
    people = {str(100 + n): name for n, name in enumerate(rng.sample(NAMES, 9))}
    orders = []
    for n in range(rng.randrange(12, 20)):
        who = rng.choice([*list(people)[:6], "900", "901"])
        orders.append({"order": f"o{n:03}", "person": who, "item": rng.choice(NOUNS)})
    named = [[o["order"], people.get(o["person"], ""), o["item"]] for o in orders]
    ordered = {o["person"] for o in orders}
    expected = {
        "inner": [row for row in named if row[1]],
        "left": named,
        "missing": [[key, name] for key, name in people.items() if key not in ordered],
    }[kind]
    told = {
        "inner": "each order of a person who is in `people.csv`: order, name, item. Keep the order "
        "of `orders.csv`",
        "left": "each order: order, name, item, with an empty name where `people.csv` does not "
        "have the person. Keep the order of `orders.csv`",
        "missing": "each person without an order: id, name. Keep the order of `people.csv`",
    }[kind]
    test = {"inner": "if row[1] in names", "left": "", "missing": ""}[kind]
    line = (
        "[[key, name] for key, name in names.items() if key not in {row[1] for row in orders}]"
        if kind == "missing"
        else f"[[row[0], names.get(row[1], ''), row[2]] for row in orders {test}]"
    )
    listed = [{"id": key, "name": name} for key, name in people.items()]
    return MadeTask(
        f"Write `/app/joined.csv`, without a header, with a line for {told}. `person` in "
        "`/app/orders.csv` is an `id` of `/app/people.csv`.",
        {"people.csv": _csv(listed), "orders.csv": _csv(orders)},
        f"""
python3 - <<'END'
import csv
names = dict(list(csv.reader(open("people.csv")))[1:])
orders = list(csv.reader(open("orders.csv")))[1:]
with open("joined.csv", "w", newline="") as out:
    csv.writer(out).writerows({line})
END
""",
        "import csv\nrows = list(csv.reader((APP / 'joined.csv').open()))\n"
        "assert rows == EXPECTED, rows",
        expected,
        category="data",
    )


def layers(rng: Random, number: int) -> MadeTask:
    """Settings in JSON are laid over one another; null deletes."""
    base = _settings(rng, 0)
    overlays: list[dict[str, Any]] = []
    expected: Any = base
    for _ in range(2 + number % 2):
        overlays.append(_overlay(rng, expected))  # upon what is there: no key is laid on nothing
        expected = _laid(expected, overlays[-1])
    files = {f"layer{n}.json": json.dumps(one, indent=2) for n, one in enumerate([base, *overlays])}
    return MadeTask(
        f"Lay the files `/app/layer1.json` to `/app/layer{len(overlays)}.json` over "
        "`/app/layer0.json`, in this order, and write the result to `/app/merged.json`. Objects "
        "are merged key by key at every depth; any other value, lists too, replaces what was "
        "there; `null` in a layer deletes the key.",
        files,
        f"""
python3 - <<'END'
import json
def laid(under, over):
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    out = dict(under)
    for key, value in over.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = laid(out.get(key), value) if key in out else value
    return out
merged = json.load(open("layer0.json"))
for number in range(1, {len(overlays) + 1}):
    merged = laid(merged, json.load(open(f"layer{{number}}.json")))
json.dump(merged, open("merged.json", "w"))
END
""",
        "found = json.loads((APP / 'merged.json').read_text())\nassert found == EXPECTED, found",
        expected,
        category="data",
        difficulty="medium",
    )


def _settings(rng: Random, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in rng.sample(NOUNS, 4):
        deeper = depth < 2 and rng.random() < 0.5
        found[key] = _settings(rng, depth + 1) if deeper else rng.choice((True, 7, "x", [1, 2]))
    return found


def _overlay(rng: Random, under: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {rng.choice(NOUNS) + "_new": rng.randrange(100)}
    for key in rng.sample(sorted(under), min(3, len(under))):
        value = under[key]
        if isinstance(value, dict) and rng.random() < 0.8:
            found[key] = _overlay(rng, value)
        else:
            found[key] = rng.choice((None, rng.randrange(100), "new", [3]))
    return found


def _laid(under: Any, over: Any) -> Any:
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    kept = {key: value for key, value in under.items() if key not in over}
    new = {k: _laid(under[k], v) if k in under else v for k, v in over.items() if v is not None}
    return kept | new


def database(rng: Random, number: int) -> MadeTask:
    """A question is answered from a SQLite database."""
    books = [
        (n, f"The {noun.title()}", rng.choice(NAMES), rng.randrange(1950, 2025))
        for n, noun in enumerate(NOUNS)
    ]
    loans = [
        (n, rng.randrange(len(books)), rng.choice(CITIES), rng.randrange(1, 40))
        for n in range(rng.randrange(80, 140))
    ]
    rows = {"books": books, "loans": loans}
    told, query, answer = _QUESTIONS[number % len(_QUESTIONS)]
    return MadeTask(
        "`/app/library.db` is a SQLite database with the tables `books(id, title, author, year)` "
        "and `loans(id, book, city, days)`, where `loans.book` is a `books.id`. There is no "
        f"`sqlite3` program, but Python has the module. {told} Write `/app/answer.csv` without a "
        "header.",
        {"rows.json": json.dumps(rows)},
        f"""
python3 - <<'END'
import csv, sqlite3
found = sqlite3.connect("library.db").execute({query!r}).fetchall()
csv.writer(open("answer.csv", "w", newline="")).writerows(found)
END
""",
        "import csv\nrows = list(csv.reader((APP / 'answer.csv').open()))\n"
        "assert rows == EXPECTED, rows",
        [list(map(str, row)) for row in answer(books, loans)],
        category="data",
        difficulty="medium",
        build=_FILL,
    )


_FILL = """
python3 - <<'END'
import json, sqlite3
rows = json.load(open("rows.json"))
db = sqlite3.connect("library.db")
db.execute("create table books(id integer primary key, title text, author text, year integer)")
db.execute("create table loans(id integer primary key, book integer, city text, days integer)")
db.executemany("insert into books values (?, ?, ?, ?)", rows["books"])
db.executemany("insert into loans values (?, ?, ?, ?)", rows["loans"])
db.commit()
END
rm rows.json
"""


def _by_author(books: list[Any], loans: list[Any]) -> list[Any]:
    days = defaultdict[str, int](int)
    for _, book, _, lent in loans:
        days[books[book][2]] += lent
    return sorted(days.items(), key=lambda item: (-item[1], item[0]))[:5]


def _never_lent(books: list[Any], loans: list[Any]) -> list[Any]:
    lent = {book for _, book, city, _ in loans if city in CITIES[:3]}
    found = [(title, year) for n, title, _, year in books if n not in lent]
    return sorted(found, key=lambda row: (row[1], row[0]))


def _old_by_city(books: list[Any], loans: list[Any]) -> list[Any]:
    seen = defaultdict[str, set[int]](set)
    for _, book, city, _ in loans:
        if books[book][3] < 1990:
            seen[city].add(book)
    return sorted((city, len(found)) for city, found in seen.items())


_QUESTIONS = (
    (
        (
            "Which five authors' books were lent for the most days in total? Lines `AUTHOR,DAYS`, "
            "most days first, equal ones by name."
        ),
        (
            "select author, sum(days) from loans join books on books.id = book"
            " group by author order by 2 desc, 1 limit 5"
        ),
        _by_author,
    ),
    (
        (
            f"Which books were never lent in {', '.join(CITIES[:3])}? Lines `TITLE,YEAR`, by year, "
            "equal years by title."
        ),
        (
            "select title, year from books where id not in (select book from loans where city in"
            f" {tuple(CITIES[:3])}) order by year, title"
        ),
        _never_lent,
    ),
    (
        (
            "For each city with any, how many different books from before 1990 were lent there? "
            "Lines `CITY,COUNT`, by city."
        ),
        (
            "select city, count(distinct book) from loans join books on books.id = book"
            " where year < 1990 group by city order by city"
        ),
        _old_by_city,
    ),
)
