"""Small Python functions: what each is to do, how it is done, how it was broken, and its inputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Program:
    """One function with its docstring, which is all that a task says of it."""

    name: str
    signature: str
    docstring: str
    body: str
    right: str
    """The part of the body that a broken one has otherwise."""
    wrong: str
    case: str
    """A Python expression of the arguments, in which ``rng`` draws."""

    def source(self, body: str) -> str:
        """Return the function with a body."""
        return f'def {self.name}{self.signature}:\n    """{self.docstring}"""\n{body}'

    @property
    def solved(self) -> str:
        return self.source(self.body)

    @property
    def broken(self) -> str:
        return self.source(self.body.replace(self.right, self.wrong, 1))

    @property
    def empty(self) -> str:
        return self.source("    raise NotImplementedError\n")


PROGRAMS = (
    Program(
        "merged",
        "(intervals)",
        "Return intervals [low, high] merged where they overlap or touch, sorted, as lists.",
        """\
    found = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1][1] = max(found[-1][1], high)
        else:
            found.append([low, high])
    return found
""",
        "max(found[-1][1], high)",
        "high",
        "([sorted(rng.sample(range(40), 2)) for _ in range(rng.randrange(9))],)",
    ),
    Program(
        "roman",
        "(number)",
        "Return a number from 1 to 3999 in Roman numerals, such as MCMXCIV for 1994.",
        """\
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    letters = "M CM D CD C XC L XL X IX V IV I".split()
    text = ""
    for value, letter in zip(values, letters):
        while number >= value:
            text += letter
            number -= value
    return text
""",
        "50, 40, 10",
        "50, 45, 10",
        "(rng.randrange(1, 4000),)",
    ),
    Program(
        "balanced",
        "(text)",
        "Say whether the brackets ()[]{} of a text are closed in the right order.",
        """\
    partners, open_ones = {")": "(", "]": "[", "}": "{"}, []
    for letter in text:
        if letter in "([{":
            open_ones.append(letter)
        elif letter in partners:
            if not open_ones or open_ones.pop() != partners[letter]:
                return False
    return not open_ones
""",
        "return not open_ones",
        "return True",
        "(''.join(rng.choices('()[]{}a', k=rng.randrange(5)))"
        " + rng.choice(('', '()', '(', '[{}]')),)",
    ),
    Program(
        "run_lengths",
        "(text)",
        "Return a list of [letter, count] for each run of equal letters in a text, in order.",
        """\
    runs = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs
""",
        "runs and runs[-1][0] == letter",
        "letter in [one for one, _ in runs]",
        "(''.join(rng.choices('aab', k=rng.randrange(12))),)",
    ),
    Program(
        "spiral",
        "(rows)",
        "Return the values of a table of equally long rows, clockwise from the top left inwards.",
        """\
    rows, found = [list(row) for row in rows], []
    while rows:
        found += rows.pop(0)
        rows = [list(row) for row in zip(*rows)][::-1]
    return found
""",
        "while rows:",
        "while rows and len(found) < 12:",
        "([[rng.randrange(99) for _ in range(w)] for w in [rng.randrange(2, 6)]"
        " for _ in range(rng.randrange(2, 6))],)",
    ),
    Program(
        "in_base",
        "(number, base)",
        "Return an integer in a base from 2 to 16, in small letters, with - if it is negative.",
        """\
    if number == 0:
        return "0"
    digits, rest = "", abs(number)
    while rest:
        rest, digit = divmod(rest, base)
        digits = "0123456789abcdef"[digit] + digits
    return "-" + digits if number < 0 else digits
""",
        '"0123456789abcdef"[digit] + digits',
        'digits + "0123456789abcdef"[digit]',
        "(rng.randrange(-999, 1000), rng.randrange(2, 17))",
    ),
    Program(
        "most_common",
        "(words, count)",
        "Return the most frequent words, most frequent first, equally frequent ones by the "
        "alphabet.",
        """\
    times = {}
    for word in words:
        times[word] = times.get(word, 0) + 1
    return sorted(times, key=lambda word: (-times[word], word))[:count]
""",
        "(-times[word], word)",
        "-times[word]",
        "([rng.choice('fedcba') for _ in range(rng.randrange(20))], rng.randrange(1, 5))",
    ),
    Program(
        "wrapped",
        "(text, width)",
        "Return the lines of a text's words, each as long as fits into the width; a word that is "
        "longer than the width stands alone.",
        """\
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
""",
        "len(lines[-1]) + 1 + len(word)",
        "len(lines[-1]) + len(word)",
        "(' '.join('x' * rng.randrange(1, 9) for _ in range(rng.randrange(12))),"
        " rng.randrange(4, 16))",
    ),
    Program(
        "build_order",
        "(needs)",
        "Return the keys of a mapping from names to lists of names that they need, each after all "
        "that it needs, and otherwise by the alphabet: the first name that is ready comes next. "
        "Names that are needed are keys as well. Raise ValueError if it cannot be.",
        """\
    left, order = {name: set(some) for name, some in needs.items()}, []
    while left:
        ready = [name for name, some in left.items() if not some - set(order)]
        if not ready:
            raise ValueError("they need one another")
        order.append(min(ready))
        del left[order[-1]]
    return order
""",
        "min(ready)",
        "max(ready)",
        "({n: rng.sample('abcdef'[:i], rng.randrange(min(i, 2) + 1))"
        " for i, n in enumerate('abcdef')},)",
    ),
    Program(
        "versions_sorted",
        "(versions)",
        "Return versions such as 1.10.2 in ascending order, numbers compared as numbers; one with "
        "a suffix, as 1.2-rc1, comes before the same without, and suffixes go by the alphabet.",
        """\
    def key(version):
        numbers, _, suffix = version.partition("-")
        return [int(number) for number in numbers.split(".")], not suffix, suffix
    return [*map(str, sorted(versions, key=key))]
""".replace("[*map(str, sorted(versions, key=key))]", "sorted(versions, key=key)"),
        "int(number) for",
        "number for",
        "([f'{rng.randrange(3)}.{rng.randrange(12)}' + rng.choice(('', '', '-rc1', '-a'))"
        " for _ in range(rng.randrange(2, 9))],)",
    ),
    Program(
        "change",
        "(amount, coins)",
        "Return the smallest number of coins that make an amount, each as often as needed; None "
        "if they cannot make it.",
        """\
    best = [0] + [None] * amount
    for total in range(1, amount + 1):
        some = [best[total - c] for c in coins if c <= total and best[total - c] is not None]
        best[total] = min(some) + 1 if some else None
    return best[amount]
""",
        "c <= total and best[total - c] is not None",
        "c < total and best[total - c] is not None",
        "(rng.randrange(40), sorted(rng.sample(range(2, 15), 3)))",
    ),
    Program(
        "moved",
        "(path, steps)",
        "Return the absolute path to which steps (a relative or an absolute path) lead from an "
        "absolute one; . and .. mean what they mean in a shell, / has no parent.",
        """\
    parts = [] if steps.startswith("/") else path.split("/")
    found = []
    for part in [*parts, *steps.split("/")]:
        if part == "..":
            found = found[:-1]
        elif part not in ("", "."):
            found.append(part)
    return "/" + "/".join(found)
""",
        '[] if steps.startswith("/") else path.split("/")',
        'path.split("/")',
        "('/' + '/'.join(rng.choices('abc', k=rng.randrange(4))),"
        " rng.choice(('', '/')) + '/'.join(rng.choices(('..', '.', 'x', 'y', ''), k=4)))",
    ),
)
