"""``libra export`` of a run that is over: nothing of it is there but its directories."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from libra_cli.cli.main import app  # noqa: E402
from libra_cli.config.recipe import Recipe  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.runtime.store.reader import Reader  # noqa: E402
from libra_cli.runtime.store.run_directory import keep_recipe  # noqa: E402
from tests import sample_run  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
SCORES = {10: 0.25, 20: 0.75, 30: 0.5}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints on this machine, the second of which is the best."""
    base = tmp_path_factory.mktemp("export")
    model_dir, work = base / "model", base / "work"
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, seed=0)
    model.save_pretrained(model_dir)
    save_tokenizer(tokenizer, model_dir, max_len=POSITIONS)
    run_dir: Path = sample_run.write(base / "run")
    node = {"host": "local", "python": sys.executable, "workdir": str(work)}
    recipe = {"nodes": [node], "model": {"path": str(model_dir), "max_len": 1024}}
    keep_recipe(Recipe.model_validate(recipe), run_dir)
    with Reader(run_dir) as reader:
        host_dir = work / "runs" / reader.run().id / "local"
    host_dir.mkdir(parents=True)
    trained = {"model_dir": str(model_dir), "dtype": "float32"}
    (host_dir / "trainer.json").write_text(json.dumps(trained))
    for step, score in SCORES.items():
        directory = host_dir / "checkpoints" / f"step-{step:06d}-e1"
        with torch.no_grad():
            model.model.norm.weight.fill_(step)
        dcp.save({"model": model.state_dict()}, checkpoint_id=directory, no_dist=True)
        (directory / "checkpoint.json").write_text(json.dumps({"step": step, "score": score}))
    return run_dir


def libra(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def step_in(directory: Path) -> int:
    """The step that a model was saved at."""
    return int(load_file(directory / "model.safetensors")["model.norm.weight"][0])


@pytest.mark.parametrize(("chosen", "step"), [((), 30), (("--best",), 20), (("--step", 10), 10)])
def test_the_checkpoint_that_was_asked_for_is_made_a_model(
    run_dir: Path, tmp_path: Path, chosen: tuple[object, ...], step: int
):
    code, told = libra("export", run_dir, *chosen, "--to", tmp_path / "mine")
    assert code == 0, told
    assert step_in(tmp_path / "mine") == step
    assert f"| steps | {step} of" in (tmp_path / "mine" / "README.md").read_text()
    assert libra("export", run_dir, *chosen, "--to", tmp_path / "mine")[0] == 2, "it is not empty"


def test_without_a_directory_it_is_left_on_its_host(run_dir: Path):
    code, told = libra("export", run_dir)
    assert code == 0, told
    place = re.search(r"local:(\S+)", told)
    assert place is not None, told
    assert step_in(Path(place[1])) == 30


def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(run_dir: Path):
    code, told = libra("export", run_dir, "--step", 7)
    assert code == 2
    assert "there is no checkpoint of step 7: there are 10, 20, 30" in told
