"""What is told of servers on the trainer's GPUs is worth it, fits, and is a recipe as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from libra_cli.app import idle_servers
from libra_cli.app.dry_run import plan_of
from libra_cli.app.rebalance import explain
from libra_cli.cli.main import app
from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.planning.recipe_placement import RecipePlacement

MODEL = {"path": "/models/Qwen3-8B", "max_len": 16_384}
TRAINING = {"micro_batch_tokens": 16_384, "lora": {"rank": 16}}


def recipe(*pools: str, **more: Any) -> dict[str, Any]:
    """Hosts of eight GPUs, an adapter, and trajectories with slow tools."""
    return {
        "nodes": [{"host": f"gpu-{n}", "gpus": 8, "pool": pool} for n, pool in enumerate(pools)],
        "model": MODEL,
        "rollout": {"buckets": [{"name": "all", "tensor_parallel": 8, "max_num_seqs": 128}]},
        "training": TRAINING,
        "planner": {
            "profile": "a800-qwen3-8b",
            "lengths": {"generated": 3000, "turns": 8, "tool_s": 5.0},
        },
        **more,
    }


def written(tmp_path: Path, body: dict[str, Any]) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def advice(tmp_path: Path, body: dict[str, Any]) -> tuple[str, ...]:
    return plan_of(written(tmp_path, body))[1].advice


WAITS = ("rollout", "train", "train", "train", "train")


def test_what_is_told_is_a_recipe_and_there_is_no_more_to_tell(tmp_path: Path) -> None:
    body = recipe(*WAITS)
    (told,) = advice(tmp_path, body)
    more = yaml.safe_load("{" + told.partition("in the recipe: ")[2] + "}")
    better = body | more
    assert advice(tmp_path, better) == ()
    found = Recipe.model_validate(better)
    layout = RecipePlacement(found).layout_of(initial_plan(found), slots_of(found))
    assert (layout.rollout_gpus, layout.training_gpus) == (8, 32)
    (idle,) = layout.idle
    assert (idle.tensor_parallel, idle.number) == (8, 4)


def test_open_nodes_are_written_out_with_the_servers_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_servers, "LEAST", 0.0)
    body = recipe("auto", "auto", "auto")
    for node in body["nodes"]:
        del node["pool"]
    body |= {"rollout": {}, "training": TRAINING | {"groups_per_step": 8}}
    (told,) = advice(tmp_path, body)
    more = yaml.safe_load("{" + told.partition("in the recipe: ")[2] + "}")
    found = Recipe.model_validate(body | more)
    layout = RecipePlacement(found).layout_of(initial_plan(found), slots_of(found))
    told_of = plan_of(written(tmp_path, body))[1].plan.reasons
    assert str(layout).startswith(told_of[-1])
    assert [one.number for one in layout.idle] == [2]


@pytest.mark.parametrize(
    "more",
    [
        {"training": {"micro_batch_tokens": 131_072}, "model": MODEL | {"max_len": 131_072}},
        {"training": TRAINING | {"stream": True}},
        {"planner": {"profile": "a800-qwen3-8b", "lengths": {"generated": 20, "turns": 1}}},
    ],
    ids=["no memory", "a trainer that streams", "a trainer that never waits"],
)
def test_nothing_is_told_where_they_do_not_fit_or_do_not_pay(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    pools = ("rollout", "rollout", "train") if "planner" in more else WAITS
    assert advice(tmp_path, recipe(*pools, **more)) == ()


def test_the_commands_tell_it(tmp_path: Path) -> None:
    path = written(tmp_path, recipe(*WAITS))
    done = CliRunner().invoke(app, ["run", "--dry-run", str(path)])
    assert "faster: servers that take requests on the trainer's GPUs" in done.output
    notes = explain(path, trace="tau2", profile=None).notes
    assert any("serve: when-idle" in note for note in notes)
