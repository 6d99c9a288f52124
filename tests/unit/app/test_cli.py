"""The commands, as far as they go without a host."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from libra_cli import __version__
from libra_cli.cli.main import app
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.plugins.finding import find
from tests.sample_run import write

CHECKOUT = Path(__file__).parents[3]
QUICKSTART = CHECKOUT / "recipes/quickstart.yaml"


def libra(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_version_is_printed():
    assert libra("--version").output.strip() == __version__


def test_a_wrong_recipe_exits_with_2_and_says_where_and_what_next(tmp_path):
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("nodes:\n  - {host: local, gpu: 1}\nmodel: {path: /m}\n")
    done = libra("run", str(recipe))
    assert done.exit_code == 2
    assert "wrong.yaml:2" in done.output
    assert "did you mean 'gpus'" in done.output
    assert "next:" in done.output


def test_a_dry_run_shows_every_process_and_touches_nothing(tmp_path):
    done = libra("run", "--dry-run", str(QUICKSTART))
    assert done.exit_code == 0
    for word in (
        "libra_cli.node.rollout.server",
        "libra_cli.node.trainer.main",
        "libra_cli.node.model.build",
    ):
        assert word in done.output
    assert "Bearer " not in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cpus", "gpus", "open"])
def test_a_dry_run_shows_what_hosts_are_started_with(name):
    """Whole, so that whoever changes a variable or an argument of a process sees it here. The lines
    on memory are compared by ``core.launch.test_memory_table``."""
    place = CHECKOUT / "tests/fixtures/dry_runs" / name
    done = libra("run", "--dry-run", str(place.with_suffix(".yaml")))
    told = [line for line in done.output.splitlines() if not line.startswith("memory: ")]
    assert told == place.with_suffix(".txt").read_text().splitlines()


def test_a_dry_run_refuses_servers_that_the_model_cannot_be_divided_among(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"num_attention_heads": 32, "num_experts": 128, "moe_intermediate_size": 770}'
    )
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{path: {tmp_path}}}\nenvironment: {{name: calculator}}\n"
        "nodes:\n- {host: a, gpus: 4, pool: rollout}\n- {host: b, gpus: 4, pool: train}\n"
        "rollout: {buckets: [{tensor_parallel: 4, max_num_seqs: 8}]}\nplanner: {kind: fixed}\n"
    )
    done = libra("run", "--dry-run", str(recipe))
    assert done.exit_code != 0
    assert "an expert of it is 770 wide" in " ".join(done.output.split())
    assert "one of 1, 2" in " ".join(done.output.split())
    smaller = recipe.read_text().replace(
        "gpus: 4, pool: rollout", "gpus: 4, slots: 2, pool: rollout"
    )
    recipe.write_text(smaller.replace("tensor_parallel: 4", "tensor_parallel: 2"))
    assert libra("run", "--dry-run", str(recipe)).exit_code == 0


def test_a_dry_run_that_fits_no_gpu_is_shown_and_then_refused(tmp_path):
    recipe = tmp_path / "r.yaml"
    whole = (
        "environment: {name: calculator}\nmodel: {path: /models/Qwen3-32B, max_len: 4096}\n"
        "nodes: [{host: a, gpus: 2, slots: 2, pool: [rollout, train]}]\n"
    )
    recipe.write_text(whole)
    done = libra("run", "--dry-run", str(recipe))
    told = " ".join(done.output.split())
    assert done.exit_code == 2
    assert "each of 1 rank" in told
    assert told.index("libra_cli.node.trainer.main") < told.index(
        "no GPU has the memory for: trainer"
    )
    assert "next: train on more GPUs" in told
    assert "training.lora or training.optimizer: adamw_offload" in told
    recipe.write_text(whole + "training: {lora: {}}\n")
    assert libra("run", "--dry-run", str(recipe)).exit_code == 0


def test_a_run_takes_the_scheduling_policy_of_help_extend_by_its_entry_point(tmp_path, monkeypatch):
    page = (CHECKOUT / "libra_cli/help/extend.md").read_text()
    section = page.partition("## A scheduling policy")[2].partition("\n## ")[0]
    code, points = (section.partition(f"```{kind}\n")[2] for kind in ("python", "toml"))
    (tmp_path / "my_package.py").write_text(code.partition("```")[0])
    about = tmp_path / "my_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (group,) = tomllib.loads(points.partition("```")[0])["project"]["entry-points"].items()
    offered = [f"[{group[0]}]", *(f"{name} = {place}" for name, place in group[1].items())]
    (about / "entry_points.txt").write_text("\n".join(offered))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\n"
        "environment: {name: calculator}\nscheduler: {policy: shortest}\n"
    )
    done = libra("run", "--dry-run", str(recipe))
    assert "there is no scheduling policy 'shortest'" in " ".join(done.output.split())
    monkeypatch.syspath_prepend(tmp_path)
    done = libra("run", "--dry-run", str(recipe))
    assert done.exit_code == 0, done.output
    assert find(POLICIES, "shortest")().rank is not None


def test_a_dry_run_reads_the_tasks_and_names_a_damaged_line(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    environment = "environment: {name: dataset, tasks: t.jsonl}\n"
    text = "nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\n" + environment
    (tmp_path / "r.yaml").write_text(text)
    done = libra("run", "--dry-run", str(tmp_path / "r.yaml"))
    assert f"tasks: dataset: 1 tasks from {tmp_path / 't.jsonl'}" in done.output
    (tmp_path / "t.jsonl").write_text("{}\n{")
    done = libra("run", "--dry-run", str(tmp_path / "r.yaml"))
    assert done.exit_code == 2
    assert "t.jsonl:2: not JSON" in done.output.replace("\n", "")


def test_a_dry_run_shows_the_plan_and_then_names_an_environment_that_is_not_there(tmp_path):
    text = "nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\n"
    (tmp_path / "r.yaml").write_text(text + "environment: {name: 'no_such:It'}\n")
    done = libra("run", "--dry-run", str(tmp_path / "r.yaml"))
    assert done.exit_code == 2
    assert "plan:" in done.output
    assert "importing no_such failed" in done.output.replace("\n", " ")
    assert "export PYTHONPATH=$PWD" in done.output


def test_a_dry_run_names_an_agent_that_is_not_there_and_a_run_leaves_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("def agent(task, base_url, api_key, model): return 1.0\n")
    text = "nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\nenvironment: {name: calculator}\n"
    agent = "agent: {directory: ., function: 'mine:agnt'}\n"
    (tmp_path / "r.yaml").write_text(text + agent)
    done = libra("run", "--dry-run", str(tmp_path / "r.yaml"))
    assert done.exit_code == 2
    assert "did you mean 'agent'?" in done.output.replace("\n", " ")
    assert libra("run", str(tmp_path / "r.yaml")).exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_status_of_nothing_says_what_to_type():
    done = libra("status")
    assert done.exit_code == 2
    assert "next:" in done.output


def test_status_reads_the_newest_run(tmp_path):
    write(tmp_path / "runs/old")
    write(tmp_path / "runs/new")
    done = libra("status", "--json")
    assert done.exit_code == 0
    assert '"format": 2' in done.output


def test_logs_of_an_unknown_node_name_the_run(tmp_path):
    write(tmp_path / "runs/one")
    done = libra("logs", "nowhere")
    assert done.exit_code == 2
    assert "'nowhere'" in done.output
    assert "runs/one" in done.output


def test_a_run_without_a_checkpoint_cannot_go_on(tmp_path):
    done = libra("run", str(QUICKSTART), "--resume", str(tmp_path / "none"))
    assert done.exit_code == 2
    assert "next:" in done.output


def test_a_wrong_environment_is_told_before_any_host_is_asked(tmp_path):
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text(QUICKSTART.read_text().replace("pointer-chase\n", "pointer-chas\n"))
    done = libra("run", str(recipe))
    assert done.exit_code == 2
    assert "pointer-chase" in done.output
    assert not (tmp_path / "runs").exists()
