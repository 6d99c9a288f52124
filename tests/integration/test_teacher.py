"""A real teacher: vLLM's own server, what it says of tokens, and a run that learns from it."""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
pytest.importorskip("vllm", reason="needs the [cpu] extra")

from libra_cli.config.environment import TeacherSpec  # noqa: E402
from libra_cli.config.errors import TeacherError  # noqa: E402
from libra_cli.core.actions import AskTeacher  # noqa: E402
from libra_cli.core.costs.memory import CPU_SERVER_GIB, GIB  # noqa: E402
from libra_cli.core.events import TeacherAnswered, TeacherFailed  # noqa: E402
from libra_cli.core.types import TrajectoryId  # noqa: E402
from libra_cli.node.agent.host_facts.facts import facts  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.runtime.episodes.renderer import Renderer  # noqa: E402
from libra_cli.runtime.teacher import Teacher  # noqa: E402
from tests.live import START_S, STEP_S, live  # noqa: E402
from tests.teacher_server import teacher_server  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
KEY = "of-the-teacher"
MAX_LEN = 256
CACHE_GIB = 0.25
"""KV cache of the policy's server, whose share of the host's memory is chosen for it."""
WHO = TrajectoryId(0, 0)


class Served(NamedTuple):
    """The model and its teacher, which is itself."""

    model_dir: Path
    model: Any
    url: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("teacher")
    model = new_model(build_tokenizer(), seed=7).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # a fresh model is nearly uniform
    model.save_pretrained(directory)
    save_tokenizer(build_tokenizer(), directory, max_len=POSITIONS)
    log = directory / "teacher.log"
    with teacher_server(directory, log, max_len=MAX_LEN + 1, key=KEY) as url:
        yield Served(directory, model, url)


def spec(served: Served, **keys: Any) -> TeacherSpec:
    return TeacherSpec.model_validate({"url": served.url, "api_key": KEY, **keys})


def play(teacher: Teacher, scene: Coroutine[Any, Any, Any]) -> Any:
    async def closing() -> Any:
        try:
            return await asyncio.wait_for(scene, 120)
        finally:
            await teacher.close()

    return asyncio.run(closing())


def test_it_says_what_transformers_says_of_the_very_tokens(served: Served):
    sequences = (array("i", [1, 70, 90, 265, 12]), array("i", range(5, 5 + MAX_LEN)))
    teacher = Teacher(spec(served))
    said = play(teacher, teacher.perform(AskTeacher(WHO, sequences)))
    assert isinstance(said, TeacherAnswered)
    for tokens, logprobs in zip(sequences, said.logprobs, strict=True):
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            known = torch.log_softmax(served.model(ids).logits[0, :-1].float(), -1)
        expected = known.gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        assert list(logprobs) == pytest.approx([0.0, *expected], abs=2e-4)


def test_its_own_tokenizer_passes_and_another_one_does_not(served: Served, tmp_path: Path):
    teacher = Teacher(spec(served))
    own = Renderer(served.model_dir)
    assert play(teacher, teacher.check(own, max_len=MAX_LEN)) == "teacher"
    save_tokenizer(build_tokenizer(), tmp_path, max_len=POSITIONS)
    file = tmp_path / "tokenizer.json"
    known = json.loads(file.read_text())
    words = known["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    file.write_text(json.dumps(known))
    other = Teacher(spec(served))
    with pytest.raises(TeacherError, match=r"another tokenizer than the policy: token 3[56] is "):
        play(other, other.check(Renderer(tmp_path), max_len=MAX_LEN))


@pytest.mark.parametrize(
    ("keys", "max_len", "said"),
    [
        ({}, MAX_LEN + 1, "takes at most 257 tokens"),
        ({"model": "nobody"}, MAX_LEN, "has no model 'nobody'"),
        ({"api_key": "of-somebody"}, MAX_LEN, "answers status 401"),
        ({"url": "http://127.0.0.1:9/v1"}, MAX_LEN, "cannot be reached"),
    ],
)
def test_what_could_not_be_a_teacher_is_refused_at_the_start(
    served: Served, keys: dict[str, Any], max_len: int, said: str
):
    teacher = Teacher(spec(served, **keys))
    with pytest.raises(TeacherError, match=said) as caught:
        play(teacher, teacher.check(None, max_len=max_len))
    assert caught.value.hint


def test_tokens_that_it_cannot_take_are_refused(served: Served):
    for tokens in (array("i", [3] * (MAX_LEN + 2)), array("i", [3, 100_000])):
        teacher = Teacher(spec(served))
        said = play(teacher, teacher.perform(AskTeacher(WHO, (tokens,))))
        assert isinstance(said, TeacherFailed)
        assert said.refused, said.reason


RECIPE = """
run: {{name: taught, steps: 3}}
nodes:
  - host: local
    share: {{rollout: {share}, train: 0.3, serve: when-idle}}
    env: {{OMP_NUM_THREADS: "1"}}
model: {{path: {model}, max_len: {max_len}}}
environment: {{name: pointer-chase}}
teacher: {{url: {url}, api_key: "${{TEACHER_API_KEY}}"}}
rollout:
  group_size: 4
  max_turns: 4
  max_turn_tokens: 16
  buckets: [{{name: all, max_num_seqs: 16}}]
training:
  loss: distill
  groups_per_step: 4
  learning_rate: 1e-3
  max_staleness: 1
  checkpoint_every: 3
  micro_batch_tokens: 2048
  export: {{at_end: []}}
"""


def test_a_policy_that_is_its_teacher_learns_nothing_and_every_step_says_so(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEACHER_API_KEY", KEY)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # other tests ask for less
    whole = facts([], [], [], [], tmp_path, tmp_path)["mem_total"]
    assert isinstance(whole, int)
    share = (CPU_SERVER_GIB + CACHE_GIB) * GIB / whole
    text = RECIPE.format(model=served.model_dir, max_len=MAX_LEN, url=served.url, share=share)
    with live(text, tmp_path / "run", tmp_path) as run:
        run.wait_step(3, timeout_s=START_S + 3 * STEP_S)
        run.process.wait(STEP_S)
        assert run.query("SELECT state, error FROM runs") == [("finished", "")]
        batches = [json.loads(text) for (text,) in run.query("SELECT batch_json FROM steps")]
        # An answer that is off by one token, or of other tokens, is off by nats.
        assert [batch["reverse_kl"] for batch in batches] == pytest.approx([0.0] * 3, abs=1e-3)
        assert run.query("SELECT count(*) FROM notes WHERE kind = 'teacher'") == [(0,)]
        log = next((tmp_path / ".libra").rglob("logs/server-0.log")).read_text()
        assert re.search(r"Explicitly set \(0\.2[45]/", log), "its share leaves so much for a cache"
        began = "SELECT count(*) FROM turns JOIN steps ON turns.started_at"
        assert run.query(f"{began} > steps.ended_at")[0][0] > 0
        steps = run.query("SELECT started_at, ended_at FROM steps")
        inside = [
            part
            for _, part in run.happened("TurnGenerated")
            if any(began < part["started_at"] < ended for began, ended in steps)
        ]
        # What was sent just before the batch was claimed may reach the server just after it, and
        # is broken off at once.
        taken = [part for part in inside if part["finish_reason"] != "abort"]
        assert taken == [], "the server takes requests while the trainer works"
        written = (
            "".join(path.read_text(errors="ignore") for path in run.run_dir.rglob("*.json*"))
            + run.told()
        )
        assert KEY not in written
