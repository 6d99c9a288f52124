"""What is asked of a teacher and what it answers, as the types of vLLM's own server have it; no
server is started."""

from __future__ import annotations

import asyncio
import warnings
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [cpu] extra")

from aiohttp import web

from libra_cli.config.environment import TeacherSpec
from libra_cli.config.errors import TeacherError
from libra_cli.core.actions import AskTeacher
from libra_cli.core.events import TeacherAnswered
from libra_cli.core.types import TrajectoryId
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.teacher import Teacher, probed_tokens
from tests.live import require

require("vllm")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    """What of it is used; importing it warns of much."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.openai.completion import protocol
        from vllm.logprobs import Logprob
        from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
    return SimpleNamespace(
        Request=protocol.CompletionRequest,
        Response=protocol.CompletionResponse,
        Choice=protocol.CompletionResponseChoice,
        UsageInfo=protocol.UsageInfo,
        Logprob=Logprob,
        texts=convert_ids_list_to_tokens,
    )


class Answering:
    """Answers with vLLM's types: a token's log-probability is minus a hundredth of its id."""

    def __init__(self, vllm: SimpleNamespace, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        self.requests: list[Any] = []
        self._vllm = vllm
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)

    async def complete(self, request: web.Request) -> web.Response:
        vllm = self._vllm
        asked = vllm.Request.model_validate(await request.json())
        self.requests.append(asked)
        tokens: Any = asked.prompt
        texts = vllm.texts(self._tokenizer, tokens)
        said = [
            {token: vllm.Logprob(-token / 100, 1, text)}
            for token, text in zip(tokens[1:], texts[1:], strict=True)
        ]
        choice = vllm.Choice(index=0, text="x", prompt_logprobs=[None, *said])
        answer = vllm.Response(model="teacher", choices=[choice], usage=vllm.UsageInfo())
        return web.Response(text=answer.model_dump_json(), content_type="application/json")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "teacher", "max_model_len": 257}]})


def with_teacher(answering: Answering, ask: Any) -> Any:
    async def scene() -> Any:
        app = web.Application()
        app.router.add_post("/v1/completions", answering.complete)
        app.router.add_get("/v1/models", answering.models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        teacher = Teacher(TeacherSpec.model_validate({"url": url}))
        try:
            return await ask(teacher)
        finally:
            await teacher.close()
            await runner.cleanup()

    return asyncio.run(scene())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    save_tokenizer(build_tokenizer(), tmp_path, max_len=512)
    return tmp_path


def test_vllm_takes_the_request_and_its_answer_is_read(vllm: Any, model_dir: Path):
    answering, tokens = Answering(vllm, model_dir), array("i", [5, 90, 266, 17])
    said = with_teacher(
        answering, lambda teacher: teacher.perform(AskTeacher(TrajectoryId(0, 0), (tokens,)))
    )
    assert isinstance(said, TeacherAnswered)
    assert list(said.logprobs[0]) == pytest.approx([0.0, -0.9, -2.66, -0.17])
    (request,) = answering.requests
    assert request.prompt == list(tokens)
    sampling = request.to_sampling_params(1, {})
    assert (sampling.prompt_logprobs, sampling.max_tokens) == (0, 1)


def test_every_token_says_the_same_to_vllm_and_to_the_renderer(vllm: Any, model_dir: Path):
    answering, renderer = Answering(vllm, model_dir), Renderer(model_dir)
    assert with_teacher(answering, lambda one: one.check(renderer, max_len=256)) == "teacher"
    asked = {token for request in answering.requests for token in request.prompt}
    assert asked == set(probed_tokens(renderer))
    assert set(renderer.added_tokens) <= asked


def test_two_tokens_that_changed_places_are_found(
    vllm: Any, model_dir: Path, tmp_path_factory: Any
):
    other = tmp_path_factory.mktemp("other")
    save_tokenizer(build_tokenizer(), other, max_len=512)
    file = other / "tokenizer.json"
    text = file.read_text()
    file.write_text(text.replace('"content": "start "', '"content": "stop "'))
    assert file.read_text() != text
    with pytest.raises(
        TeacherError, match="another tokenizer than the policy: token 265 is 'start"
    ):
        with_teacher(
            Answering(vllm, model_dir), lambda one: one.check(Renderer(other), max_len=256)
        )
