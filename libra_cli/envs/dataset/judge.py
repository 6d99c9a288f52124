"""The reward ``judge``: what a language model behind an OpenAI-compatible URL says of an answer.

The judge reads ``prompt`` with the question, the row's truth and the answer filled in, and its
reward is the last ``Score: NUMBER`` of what it says after thinking, from ``scale`` to 0 and 1.

**No failure is ever scored.** Connections that break, time-outs, statuses 408, 409, 425, 429 and
5xx, and replies that are cut or have no number are tried again, ``ATTEMPTS`` times in all, with
waits that double and that ``Retry-After`` lengthens; any other status at once, and the last
attempt, are EnvironmentBroken. An answer for which the judge has too small a context is told it
without its middle, of half the length each time; ``judge_cut`` is 1 then.

**Asked once.** Replies are kept by the hash of the request in ``judge.sqlite`` of the run's
directory, so that the same answer to the same row costs nothing, also after a resume.

**The budget is held.** A request counts before it is sent, with the most tokens that it can take
(its bytes and its limit), and with those it took when it is answered. When no request fits any
more, this is logged once, ``judge_spent`` is 1, and from then on the reward of the judge is the
mean of all that it gave: it then makes no difference between answers, and other rewards go on.
Where there are no others, it is EnvironmentBroken, with which the run ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.config.frozen_models import is_loopback
from libra_cli.envs.arguments import key_of, spec_of
from libra_cli.envs.dataset.judge_file import JudgeFile
from libra_cli.envs.dataset.rewards import Graded, ModelAnswer
from libra_cli.envs.dataset.rows import column, question_of, shown, truth_of

PROMPT = """Question:
{question}

Reference answer:
{truth}

Answer to be judged:
{answer}

Does the answer to be judged come to the reference answer? Think briefly, then end with "Score: 1"
if it does, or "Score: 0" if not."""
ATTEMPTS = 5
BACKOFF_S = 1.0
"""The first wait; each is twice the one before, and up to half as much longer or shorter."""
LONGEST_WAIT_S = 60.0
SHORTEST = 512
"""Characters of an answer below which it is not the answer that is too long for the judge."""
FILE = "judge.sqlite"
_TEMPORARY = (408, 409, 425, 429)
_TOO_LONG = re.compile(
    r"context.{0,3}(length|size|window)|too (long|large)|maximum.{0,40}tokens|less than \d+ tokens",
    re.IGNORECASE,
)
"""How vLLM, SGLang, TGI, llama.cpp and providers say so, with status 400, 413 or 422."""
_SCORE = re.compile(r"score\W{0,6}?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_NAME = re.compile(r"\{([A-Za-z_][\w.]*)\}")
_LOG = logging.getLogger(__name__)


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class JudgeBudget(_Spec):
    """What the judge may cost in a run, resumed or not."""

    requests: int | None = Field(default=None, ge=0)
    """Requests that are sent, those that fail too. Null: as many as there are."""
    tokens: int | None = Field(default=None, ge=0)
    """Tokens of prompts and replies, as the server counts them. Null: as many as there are."""


class JudgeSpec(_Spec):
    """The keys of the argument ``judge`` of the environment ``dataset``."""

    url: str
    """The base URL, for example http://127.0.0.1:8000/v1; /chat/completions is added."""
    model: str
    """The model's name at the server."""
    prompt: str = PROMPT
    """What the judge is told; {question}, {truth}, {answer} and {COLUMN.KEY} are filled in."""
    api_key: str | None = None
    """The name of the environment's secret that is its key. Null: none is sent."""
    scale: tuple[float, float] = (0.0, 1.0)
    """The scores that are worth 0 and 1; a number outside is no score."""
    budget: JudgeBudget = JudgeBudget()
    """How many requests and tokens the judge may cost in a run."""
    body: dict[str, JsonValue] = {}
    """Keys of the request, in place of temperature 0 and max_tokens 1024; null removes one."""
    concurrency: int = Field(default=32, ge=1)
    """The most requests at the same time."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """How long a request may take; environment.tool_timeout_s is how long all attempts may."""


def judge_of(
    given: Mapping[str, Any],
    secrets: Mapping[str, str],
    run_directory: str | None,
    *,
    alone: bool,
) -> Judge:
    """Return the judge of a recipe, of which a process has one.

    Raises:
        EnvironmentBroken: the argument is wrong.
    """
    text = json.dumps(given, sort_keys=True)
    key = key_of(given.get("api_key"), secrets, environment="dataset", argument="judge")
    return _judge(text, key, run_directory, alone)


@lru_cache(maxsize=16)
def _judge(text: str, key: str | None, run_directory: str | None, alone: bool) -> Judge:
    spec = spec_of(JudgeSpec, json.loads(text), environment="dataset", argument="judge")
    if "{answer}" not in spec.prompt:
        raise EnvironmentBroken("environment 'dataset': judge.prompt has no {answer}")
    if spec.scale[0] == spec.scale[1]:
        raise EnvironmentBroken("environment 'dataset': judge.scale is one number twice")
    path = str(Path(run_directory) / FILE) if run_directory else ":memory:"
    # At another address, or with more budget, it is the judge that it was.
    asked = spec.model_dump_json(include={"model", "prompt", "scale", "body"})
    name = hashlib.sha256(asked.encode()).hexdigest()
    return Judge(spec, key, JudgeFile(path, name), alone=alone)


class Judge:
    """A language model that scores answers. It belongs to one event loop."""

    def __init__(self, spec: JudgeSpec, key: str | None, file: JudgeFile, *, alone: bool) -> None:
        """``alone`` says that there is no other reward."""
        self._spec = spec
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._file = file
        self._alone = alone
        self._permits = asyncio.Semaphore(spec.concurrency)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def grade(self, answered: ModelAnswer) -> Graded:
        """Return what the judge says of an answer, or of its two ends where it is too long.

        Raises:
            EnvironmentBroken: it says nothing, or the budget is spent and it is alone.
        """
        most, told = len(answered.text), answered
        while True:
            try:
                graded = await self._grade(told)
            except _TooLong as error:
                most //= 2
                if most < SHORTEST:
                    raise EnvironmentBroken(f"judge {self._spec.url}: {error}") from error
                told = replace(answered, text=_ends_of(answered.text, most))
            else:
                cut = {"cut": float(told is not answered)}
                return replace(graded, metrics={**graded.metrics, **cut})

    async def _grade(self, answered: ModelAnswer) -> Graded:
        """Raises ``_TooLong``, and what ``grade`` does."""
        body = self._body(self._filled_in(answered))
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        # An answer that two members of a group give is asked about once.
        lock = self._asking.setdefault(digest, asyncio.Lock())
        async with lock:
            known = self._file.reply(digest)
            if known is not None and (value := self._value(known)) is not None:
                return Graded(value, {"cached": 1.0, "spent": 0.0})
            async with self._permits:
                value = await self._ask(body, digest)
        if value is not None:
            return Graded(value, {"cached": 0.0, "spent": 0.0})
        self._tell_spent()
        return Graded(self._file.mean(), {"cached": 0.0, "spent": 1.0})

    async def _ask(self, body: dict[str, Any], digest: str) -> float | None:
        """Ask until there is a score; None if the budget does not allow it."""
        most = len(json.dumps(body, ensure_ascii=False).encode()) + self._most_replied(body)
        failure = _Failed("")
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(max(failure.wait_s, _backoff_s(attempt)))
            budget = self._spec.budget
            if not self._file.reserve(most, budget.requests, budget.tokens):
                return None
            used = most  # nobody knows what a request took that is cancelled
            try:
                reply, used = await self._post(body, most)
                value = self._value(reply)
                if value is not None:
                    self._file.keep(digest, reply, value)
                    return value
                failure = _Failed(f"its reply has no score: {reply[-200:]!r}")
            except _Failed as error:
                failure, used = error, error.used
            except _TooLong:
                used = 0
                raise
            finally:
                self._file.settle(most - used)
        raise EnvironmentBroken(f"judge {self._spec.url}: {failure} ({ATTEMPTS} attempts)")

    async def _post(self, body: dict[str, Any], most: int) -> tuple[str, int]:
        """Send one request, and return the reply's text and the tokens it took.

        Raises:
            _Failed: it may be tried again.
            _TooLong: it has no room for a request of this length.
            EnvironmentBroken: that would be useless.
        """
        url = self._spec.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        timeout = aiohttp.ClientTimeout(total=self._spec.timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=not is_loopback(url)) as session,
                session.post(url, json=body, headers=self._headers) as response,
            ):
                text = await response.text()
                status, wait = response.status, response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            used = 0 if isinstance(error, aiohttp.ClientConnectorError) else most
            raise _Failed(f"{type(error).__name__}: {error}", used=used) from error
        if status in _TEMPORARY or status >= 500:
            seconds = min(float(wait), LONGEST_WAIT_S) if wait.isdecimal() else 0.0
            raise _Failed(f"status {status}: {text[:200]}", seconds)
        if status in (400, 413, 422) and _TOO_LONG.search(text):
            raise _TooLong(f"status {status}: {text[:200]}")
        if status != 200:
            raise EnvironmentBroken(
                f"judge {self._spec.url}: status {status}: {text[:200]}",
                hint="judge.api_key names one of environment.secrets" if status == 401 else "",
            )
        return _read(text, most)

    def _filled_in(self, answered: ModelAnswer) -> str:
        task = answered.task

        def value(name: str) -> str:
            if name == "answer":
                return answered.text
            if name == "question":
                return question_of(answered.prompt)
            truth = name == "truth"
            found = truth_of(task, answered.truth_column) if truth else column(task, name)
            if found is None:
                raise EnvironmentBroken(
                    f"judge.prompt has {{{name}}}, and the row has not: {shown(task)}"
                )
            return _text(found)

        return _NAME.sub(lambda match: value(match[1]), self._spec.prompt)

    def _body(self, prompt: str) -> dict[str, Any]:
        body = {"temperature": 0.0, "max_tokens": 1024} | self._spec.body
        return {
            "model": self._spec.model,
            "messages": [{"role": "user", "content": prompt}],
            **{key: value for key, value in body.items() if value is not None},
        }

    def _most_replied(self, body: Mapping[str, Any]) -> int:
        limit = body.get("max_completion_tokens", body.get("max_tokens", 0))
        return limit if isinstance(limit, int) else 0

    def _value(self, reply: str) -> float | None:
        """The reward that a reply gives; None if it gives none."""
        said = reply.rpartition("</think>")[2]
        scores = _SCORE.findall(said)
        try:
            score = float(scores[-1] if scores else said.strip())
        except ValueError:
            return None
        worst, best = self._spec.scale
        value = (score - worst) / (best - worst)
        return value if 0.0 <= value <= 1.0 else None

    def _tell_spent(self) -> None:
        requests, tokens = self._file.spent()
        spent = f"the judge's budget is spent: {requests} requests, {tokens} tokens"
        if self._alone:
            raise EnvironmentBroken(
                f"{spent}, and no other reward is left",
                hint="raise judge.budget in the recipe, then: libra run RECIPE --resume RUN_DIR",
            )
        if self._file.tell_once():
            _LOG.warning("%s; from now on its reward is the mean of those it gave", spent)


class _Failed(Exception):
    """A request that may be tried again, after ``wait_s`` at the earliest; it took tokens."""

    def __init__(self, reason: str, wait_s: float = 0.0, *, used: int = 0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.used = used


class _TooLong(Exception):
    """A request for which the judge has too small a context."""


def _ends_of(text: str, most: int) -> str:
    """Return so many characters of a text, half from each end, and how many are left out."""
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"


def _backoff_s(attempt: int) -> float:
    wait_s = BACKOFF_S * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.5)
    return min(wait_s, LONGEST_WAIT_S)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read(text: str, most: int) -> tuple[str, int]:
    try:
        answer = json.loads(text)
        choice = answer["choices"][0]
        content, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        usage = (answer.get("usage") or {}).get("total_tokens")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Failed(f"its answer is no chat completion: {text[:200]}", used=most) from error
    used = usage if isinstance(usage, int) else most
    if cut:  # a score in it would be one that it only thought of
        raise _Failed("its reply was cut at judge.body.max_tokens", used=used)
    return content or "", used
