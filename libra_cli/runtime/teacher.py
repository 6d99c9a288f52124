"""The teacher: a vLLM server of the user's, asked how likely it finds tokens that the policy said.

Asked is its completions endpoint, with the exact token ids as the prompt, for ``prompt_logprobs``;
it generates one token, which is thrown away. Before a run begins ``check`` shows that the server
answers, takes sequences as long as trajectories may be, and has the policy's vocabulary: otherwise
an id would be another word there, and the numbers would look like any others.

    answer                                           what it means
    statuses 408, 409, 425, 429, 5xx, a broken       tried ``TRIES`` times; then it is away, and
    connection                                       the machine asks again later
    no answer in time, 401, 403, 404, something      it is away
    that is no log-probabilities of these tokens
    another status of 4xx                            these tokens are refused
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import aiohttp

from libra_cli.config.environment import TeacherSpec
from libra_cli.config.errors import NONSENSE, TeacherError
from libra_cli.config.frozen_models import is_loopback
from libra_cli.core.actions import AskTeacher
from libra_cli.core.events import TeacherAnswered, TeacherFailed
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.supervision.failures import words_of

TRIES = 3
PAUSE_S = 0.5
"""After the first try; the pause doubles with each."""
PROBED = 256
"""Tokens of the vocabulary that are compared, besides all those that were added to it."""
_TEMPORARY = (408, 409, 425, 429)
_OF_THE_SERVER = (401, 403, 404)
_QUOTED = 200


class TeacherRefused(TeacherError):
    """The teacher answers, but not about these tokens."""


class _TriedAgain(TeacherError):
    """A failure that may be over in a second."""


class Teacher:
    """A client of the teacher's server; it belongs to one event loop."""

    def __init__(self, spec: TeacherSpec) -> None:
        self._spec = spec
        assert spec.url is not None, "with_addresses has written where it answers"
        self._url = spec.url.rstrip("/").removesuffix("/completions")
        self._model = spec.model
        self._permits = asyncio.Semaphore(spec.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def perform(self, action: AskTeacher) -> TeacherAnswered | TeacherFailed:
        """Ask for the log-probabilities of a trajectory's tokens; a failure is an event."""
        asked = [asyncio.create_task(self._logprobs(tokens)) for tokens in action.sequences]
        try:
            return TeacherAnswered(action.trajectory, tuple(await asyncio.gather(*asked)))
        except TeacherError as error:
            refused = isinstance(error, TeacherRefused)
            reason = f"{error} ({error.hint})" if error.hint else str(error)
            return TeacherFailed(action.trajectory, reason, refused)
        finally:  # what nobody waits for any more takes no place at the teacher
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def check(self, renderer: Renderer | None, *, max_len: int) -> str:
        """Ask it once; returns its model's name. Without a ``renderer`` vocabularies are not
        compared.

        Raises:
            TeacherError: it does not answer, takes shorter sequences than ``max_len`` tokens and
                one more, or has another vocabulary.
        """
        listed = await self._listed()
        name = await self._name()
        if name not in listed:
            raise TeacherError(
                f"the teacher at {self._url} has no model {name!r}",
                hint=f"in teacher: model: {next(iter(listed), 'NAME')}",
            )
        most = listed[name]
        if most is not None and most <= max_len:
            raise TeacherError(
                f"the teacher {name} at {self._url} takes at most {most} tokens, and is asked "
                f"about trajectories of model.max_len = {max_len} and one more",
                hint=f"start it with --max-model-len {max_len + 1}, or lower model.max_len",
            )
        if renderer is not None:
            await self._compare(renderer, max_len)
        return name

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _compare(self, renderer: Renderer, max_len: int) -> None:
        """Ask about tokens from all over the vocabulary, and what each of them says."""
        for tokens in _in_parts(probed_tokens(renderer), max_len):
            try:
                answer = await self._ask(tokens)
            except TeacherRefused as error:
                raise self._another(f"it refuses ids of the policy's vocabulary: {error}") from None
            for token, said in zip(tokens[1:], _texts(answer, tokens), strict=True):
                own = renderer.decode([token])
                if "�" not in own and said is not None and said.strip() != own.strip():
                    raise self._another(f"token {token} is {said!r} there and {own!r} here")

    def _another(self, why: str) -> TeacherError:
        return TeacherError(
            f"the teacher at {self._url} has another tokenizer than the policy: {why}",
            hint="a teacher of the policy's own model family has the same one, for example "
            "Qwen3-32B for Qwen3-4B",
        )

    async def _logprobs(self, token_ids: Sequence[int]) -> array[float]:
        return read_logprobs(await self._ask(token_ids), token_ids)

    async def _ask(self, token_ids: Sequence[int]) -> Any:
        """What the completions endpoint answers about these tokens, from the second on."""
        body = {
            "model": await self._name(),
            "prompt": list(token_ids),
            "add_special_tokens": False,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 1.0,
        }
        return await self._call("POST", "/completions", body)

    async def _name(self) -> str:
        if self._model is None:
            names = list(await self._listed())
            if not names:
                raise TeacherError(f"the teacher at {self._url} lists no model")
            self._model = names[0]
        return self._model

    async def _listed(self) -> dict[str, int | None]:
        """Return the server's models, each with its most tokens or None where that is not said."""
        answer = await self._call("GET", "/models")
        try:
            return {str(one["id"]): one.get("max_model_len") for one in answer["data"]}
        except NONSENSE as error:
            raise TeacherError(
                f"the teacher at {self._url} does not list its models: {_quoted(answer)}",
                hint="teacher.url is that of an OpenAI-compatible server, and ends in /v1",
            ) from error

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async with self._permits:
            for tried in range(TRIES):
                try:
                    return await self._once(method, path, body)
                except _TriedAgain as error:
                    if tried == TRIES - 1:
                        raise TeacherError(str(error), hint=error.hint) from None
                await asyncio.sleep(PAUSE_S * 2.0**tried)
        raise AssertionError("unreachable")

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        key = self._spec.api_key
        headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        try:
            async with self._opened().request(
                method, self._url + path, json=body, headers=headers
            ) as response:
                status, text = response.status, await response.text()
        except TimeoutError as error:
            raise TeacherError(
                f"the teacher at {self._url} has not answered within {self._spec.timeout_s:g} s",
                hint="raise teacher.timeout_s, or lower teacher.concurrency",
            ) from error
        except (aiohttp.ClientError, UnicodeDecodeError) as error:
            raise _TriedAgain(
                f"the teacher at {self._url} cannot be reached: {words_of(error)}",
                hint="start it: vllm serve MODEL --port 8000; teacher.url says where it is",
            ) from error
        if status == 200:
            return _json(text, self._url)
        raise self._failure(status, text)

    def _failure(self, status: int, text: str) -> TeacherError:
        said = f"the teacher at {self._url} answers status {status}: {_quoted(text)}"
        if status in _TEMPORARY or status >= 500:
            return _TriedAgain(said)
        if status in (401, 403):
            return TeacherError(said, hint='teacher: {api_key: "${TEACHER_API_KEY}"}')
        if status in _OF_THE_SERVER:
            return TeacherError(said, hint="teacher.url ends in /v1; teacher.model is its model")
        return TeacherRefused(said)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._spec.timeout_s)
            self._session = aiohttp.ClientSession(
                timeout=timeout, trust_env=not is_loopback(self._url)
            )
        return self._session


def probed_tokens(renderer: Renderer) -> list[int]:
    """Tokens by which two vocabularies are told apart: some from all over it, and all that were
    added to it after it was learned, which differ most between models of a family."""
    size = renderer.num_tokens
    spread = {number * size // PROBED for number in range(PROBED)}
    return sorted(spread | set(renderer.added_tokens))


def read_logprobs(answer: Any, token_ids: Sequence[int]) -> array[float]:
    """The log-probabilities of these tokens in an answer of vLLM; 0 for the first.

    Raises:
        TeacherError: it has none, or those of other tokens.
    """
    found = array("f", [0.0])
    for token, entry in zip(token_ids[1:], _entries(answer, token_ids), strict=True):
        try:
            value = float(entry[str(token)]["logprob"])
        except NONSENSE as error:
            raise _not_of_these(answer) from error
        if not isfinite(value) or value > 0.0:
            raise TeacherError(f"the teacher gives token {token} the log-probability {value}")
        found.append(value)
    return found


def _entries(answer: Any, token_ids: Sequence[int]) -> list[Any]:
    """Return what the answer says of every token but the first; raises the error of an answer that
    is not about these tokens.
    """
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
    except NONSENSE as error:
        raise _not_of_these(answer) from error
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        raise _not_of_these(answer)
    return entries[1:]


def _texts(answer: Any, token_ids: Sequence[int]) -> list[str | None]:
    """What every token but the first says, by the teacher's tokenizer; None if it has none."""
    texts: list[str | None] = []
    for token, entry in zip(token_ids[1:], _entries(answer, token_ids), strict=True):
        try:
            text = entry[str(token)].get("decoded_token")
        except NONSENSE as error:
            raise _not_of_these(answer) from error
        texts.append(text if isinstance(text, str) else None)
    return texts


def _not_of_these(answer: Any) -> TeacherError:
    return TeacherError(
        f"the teacher's answer has no prompt_logprobs of the tokens it was asked about: "
        f"{_quoted(answer)}",
        hint="teacher.url is that of a vLLM server; others do not give them",
    )


def _json(text: str, url: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise TeacherError(f"the teacher at {url} answers no JSON: {_quoted(text)}") from error


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split())[:_QUOTED]


def _in_parts(tokens: Sequence[int], most: int) -> list[list[int]]:
    """Cut tokens into sequences of at most ``most``, so that each token but the first comes after
    another one in some sequence.
    """
    step = max(1, min(most, PROBED) - 1)
    return [list(tokens[at : at + step + 1]) for at in range(0, len(tokens) - 1, step)]
