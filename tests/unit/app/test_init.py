"""``libra init`` writes a recipe that fits what there is, passes a dry run and replaces nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from libra_cli.app.init.choices import SizeChoice, model_of, sizes_for
from libra_cli.cli.main import app
from libra_cli.config.errors import HostError
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.costs.architecture import PUBLISHED
from libra_cli.runtime.doctor import discovery
from libra_cli.runtime.doctor.discovery import PACKAGES, read_report
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.hosts.transport import CommandResult
from tests.unit.runtime.test_renderer import CHATML, write_model

H100 = "NVIDIA H100 80GB HBM3"
QWEN3_8B = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


class Remote(LocalTransport):
    """A host that answers with a report, and has the files of this machine."""

    default_python = "~/.libra/venv/bin/python"

    def __init__(self, report: str, model: Path | None = None) -> None:
        self._report = report + (f"model {model}\n" if model else "")

    async def connect(self, *, timeout_s: float = 1.0) -> None:
        if self._report == "":
            raise HostError("gone: no route to host", hint="ssh gone")

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float
    ) -> CommandResult:
        if argv[0] == "sh":
            return CommandResult(0, self._report.encode(), b"")
        return await super().run(argv, stdin=stdin, timeout_s=timeout_s)


def report(*, gpus: int = 0, mib: int = 81559, used: int = 10, packages: bool = True) -> str:
    lines = ["cpus 96", f"memory {1000 * 1024**2}"]
    if packages:
        lines.append(f"python 3.12.3 {' '.join(PACKAGES)}")
    lines += [f"gpu {mib}, {used}, {H100}"] * gpus
    return "\n".join(lines) + "\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hosts(monkeypatch):
    """What each host answers; nothing: it cannot be reached."""
    reports: dict[str, Remote] = {}
    monkeypatch.setattr(discovery, "transport_to", lambda node: reports[node.name])
    return reports


@pytest.fixture
def model(tmp_path) -> Path:
    directory = tmp_path / "Qwen3-8B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3_8B))
    return write_model(directory, CHATML)


def libra(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def written(path: str = "recipe.yaml") -> Recipe:
    shown = libra("run", "--dry-run", path)
    assert shown.exit_code == 0, shown.output
    return Recipe.model_validate(yaml.safe_load(Path(path).read_text()))


def test_this_machine_and_nothing_else_gives_a_run_in_two_commands(hosts):
    hosts["local"] = Remote(report())
    done = libra("init")
    assert done.exit_code == 0
    assert "local: 96 CPUs, 1000 GiB of memory; Python 3.12.3" in done.output
    assert done.output.endswith("next: libra doctor recipe.yaml\nnext: libra run recipe.yaml\n")
    recipe = written()
    assert recipe.model.build is not None
    assert recipe.nodes[0].slot_pools == ("rollout", "train")
    quickstart = Path(__file__).parents[3] / "recipes/quickstart.yaml"
    same = Recipe.model_validate(yaml.safe_load(quickstart.read_text()))
    for section in ("model", "rollout", "training", "environment", "nodes"):
        assert getattr(recipe, section) == getattr(same, section)


def test_a_real_host_is_asked_by_a_shell_alone(tmp_path, monkeypatch):
    place = tmp_path / "bin"
    place.mkdir()
    smi = place / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '81559, 2048, {H100}'\necho '81559, 10, {H100}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    done = libra("init")
    assert done.exit_code == 0, done.output
    assert "2 x NVIDIA H100 80GB HBM3 of 80 GiB, 1 of them IN USE" in done.output
    assert written().nodes[0].gpus == 2


def test_hosts_with_gpus_and_a_model_are_left_to_the_planner(hosts, model):
    hosts["gpu-01"] = hosts["gpu-02"] = Remote(report(gpus=8), model)
    done = libra("init", "gpu-[01-02]", "--model", str(model))
    assert done.exit_code == 0, done.output
    assert "8.2 billion parameters; tool calls are read as hermes" in done.output
    recipe = written()
    assert [(node.host, node.gpus) for node in recipe.nodes] == [("gpu-01", 8), ("gpu-02", 8)]
    assert recipe.has_open_nodes
    assert recipe.model.path == str(model)
    assert (recipe.model.max_len, recipe.training.lora) == (8192, None)
    assert recipe.environment[0].name == "calculator"


def test_an_adapter_is_trained_where_all_weights_do_not_fit(hosts, model):
    hosts["gpu"] = Remote(report(gpus=3, mib=24564), model)
    assert libra("init", "gpu", "--model", str(model)).exit_code == 0
    recipe = written()
    assert recipe.training.lora is not None
    assert recipe.model.max_len < 8192


def test_a_model_for_which_nothing_is_large_enough_is_told_and_nothing_written(hosts, model):
    hosts["gpu"] = Remote(report(gpus=2, mib=8192), model)
    done = libra("init", "gpu", "--model", str(model))
    assert done.exit_code == 2
    assert "8.2 billion parameters" in done.output
    assert "next: name more hosts, or a smaller model" in done.output
    assert not Path("recipe.yaml").exists()


def test_hosts_that_do_not_answer_are_told_and_the_others_used(hosts):
    hosts["gpu-1"], hosts["gone"] = Remote(report(gpus=2)), Remote("")
    done = libra("init", "gpu-1", "gone")
    assert done.exit_code == 0
    assert "gone: no route to host\nnext: ssh gone" in done.output
    assert [node.host for node in written().nodes] == ["gpu-1"]
    assert "# gone did not answer: no route to host" in Path("recipe.yaml").read_text()


def test_nobody_answering_is_a_host_problem(hosts):
    hosts["gone"] = Remote("")
    done = libra("init", "gone")
    assert done.exit_code == 3
    assert "next: ssh gone" in done.output
    assert not Path("recipe.yaml").exists()


def test_a_host_without_python_is_to_be_set_up_first(hosts):
    hosts["gpu"] = Remote(report(gpus=2, packages=False))
    done = libra("init", "gpu")
    assert "gpu: 2 x NVIDIA H100 80GB HBM3 of 80 GiB" in done.output
    assert "no Python of libra's yet" in done.output
    assert "next: libra setup recipe.yaml" in done.output


GEFORCE = 24564
"""MiB of an RTX 4090, as nvidia-smi tells them."""


def small_model(directory: Path, name: str) -> Path:
    sizes = {
        "hidden_size": 1024 if name == "Qwen3-0.6B" else 2048,
        "intermediate_size": 3072 if name == "Qwen3-0.6B" else 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    }
    place = directory / name
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**QWEN3_8B, **sizes}))
    return write_model(place, CHATML)


@pytest.mark.parametrize(
    ("name", "mib", "share", "adapter", "max_len"),
    [
        ("Qwen3-0.6B", GEFORCE, (0.3, 0.6), False, 4096),
        ("Qwen3-1.7B", GEFORCE, (0.5, 0.4), True, 8192),
        ("Qwen3-1.7B", 81559, (0.3, 0.6), False, 8192),
    ],
)
def test_of_one_gpu_a_server_and_the_trainer_have_shares_with_which_both_fit(
    hosts, tmp_path, name, mib, share, adapter, max_len
):
    path = small_model(tmp_path, name)
    hosts["gpu"] = Remote(report(gpus=1, mib=mib), path)
    done = libra("init", "gpu", "--model", str(path))
    assert done.exit_code == 0, done.output
    recipe = written()
    (node,) = recipe.nodes
    assert node.gpus == 1
    assert node.share is not None
    assert (node.share.rollout, node.share.train) == share
    assert (recipe.training.lora is not None) == adapter
    assert recipe.model.max_len == max_len
    assert "of the GPU's memory" in Path("recipe.yaml").read_text()


def test_the_small_model_shares_one_gpu_of_several_hosts(hosts):
    hosts["a"], hosts["gpu"] = Remote(report()), Remote(report(gpus=1, mib=12288))
    done = libra("init", "a", "gpu")
    assert "a is left out (96 CPUs, 1000 GiB of memory): it has no GPU" in done.output
    (node,) = written().nodes
    assert (node.host, node.gpus, node.slot_pools) == ("gpu", 1, ("rollout", "train"))
    assert node.share is not None


def test_a_model_that_no_share_of_one_gpu_holds_is_told(hosts, model):
    hosts["gpu"] = Remote(report(gpus=1, mib=GEFORCE), model)
    done = libra("init", "gpu", "--model", str(model))
    assert done.exit_code == 2
    assert "next: name more hosts, or a smaller model" in done.output


def test_of_hosts_without_gpus_the_first_trains(hosts):
    hosts["a"] = hosts["b"] = hosts["c"] = Remote(report())
    assert libra("init", "a", "me@b", "c").exit_code == 0
    assert [(one.host, one.user, one.pool) for one in written().nodes] == [
        ("a", None, ("train",)),
        ("b", "me", ("rollout",)),
        ("c", None, ("rollout",)),
    ]


@pytest.mark.parametrize("with_model", [False, True], ids=["small", "model"])
@pytest.mark.parametrize(
    "gpus", [(2,), (3,), (8,), (1, 1), (0, 8), (1, 8), (5, 2, 1), (4,) * 6], ids=str
)
def test_whatever_gpus_there_are_the_recipe_passes_a_dry_run(hosts, model, gpus, with_model):
    for index, count in enumerate(gpus):
        hosts[f"h{index}"] = Remote(report(gpus=count), model)
    options = ["--model", str(model)] if with_model else []
    done = libra("init", *hosts, *options)
    assert done.exit_code == 0, done.output
    used = [node.gpus for node in written().nodes]
    if with_model:
        assert used == [count for count in gpus if count]
    else:
        assert sum(used) == 2


def test_the_name_of_the_run_is_that_of_the_file(hosts):
    hosts["local"] = Remote(report())
    done = libra("init", "-o", "my first (copy).yaml")
    assert done.output.endswith("next: libra run 'my first (copy).yaml'\n")
    assert written("my first (copy).yaml").run.name == "my-first-copy"


def test_a_recipe_that_is_there_stays_without_force(hosts):
    hosts["local"] = Remote(report())
    Path("recipe.yaml").write_text("mine")
    done = libra("init")
    assert done.exit_code == 2
    assert "recipe.yaml is there already" in done.output
    assert Path("recipe.yaml").read_text() == "mine"
    assert libra("init", "--force").exit_code == 0
    assert Path("recipe.yaml").read_text() != "mine"
    assert [path.name for path in Path().iterdir()] == ["recipe.yaml"]


def test_a_schema_is_named_only_where_one_is_written(hosts):
    hosts["local"] = Remote(report())
    assert libra("init", "-o", "a.yaml").exit_code == 0
    assert "$schema" not in Path("a.yaml").read_text()
    assert libra("init", "-o", "b.yaml", "--schema").exit_code == 0
    first = Path("b.yaml").read_text().partition("\n")[0]
    assert first == "# yaml-language-server: $schema=b.schema.json"
    assert json.loads(Path("b.schema.json").read_text())["title"] == "Recipe"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["local", "gpu"], "local is this machine"),
        (["a b"], "'a b' is no host"),
        (["gpu-[1-"], "bracket without its partner"),
        (["--model", "Qwen/Qwen3-8B"], "hf download Qwen/Qwen3-8B --local-dir /models/Qwen3-8B"),
    ],
)
def test_what_cannot_be_is_told_before_any_host_is_asked(hosts, arguments, words):
    done = libra("init", *arguments)
    assert done.exit_code == 2
    assert words in done.output


def test_a_model_that_is_nowhere_is_told(hosts):
    hosts["gpu"] = Remote(report(gpus=2))
    done = libra("init", "gpu", "--model", "/models/none")
    assert done.exit_code == 2
    assert "/models/none/config.json is on none of gpu" in done.output


def test_a_mixture_of_experts_is_refused_with_what_to_do(hosts, model):
    (model / "config.json").write_text(json.dumps({**QWEN3_8B, "num_experts": 128}))
    hosts["gpu"] = Remote(report(gpus=8), model)
    done = libra("init", "gpu", "--model", str(model))
    assert done.exit_code == 2
    assert "is a mixture of experts" in done.output
    assert "planner: {kind: fixed}" in done.output


def test_sizes_that_are_not_known_are_told_and_a_recipe_written(hosts, model):
    (model / "config.json").write_text("{}")
    hosts["gpu"] = Remote(report(gpus=8), model)
    done = libra("init", "gpu", "--model", str(model))
    assert "what its memory goes to is not known" in done.output
    assert written().model.max_len == 2048


def test_what_nvidia_smi_says_without_a_driver_is_no_gpu():
    told = read_report(NodeSpec(host="a"), "cpus 4\nmemory 1024\ngpu NVIDIA-SMI has failed\n")
    assert (told.cpus, told.gpus, told.python) == (4, (), "")


def test_the_memory_of_a_container_counts_if_it_is_less():
    told = read_report(NodeSpec(host="a"), f"memory {64 * 1024**2}\nmemory {8 * 1024**2}\n")
    assert told.memory_gib == 8


def test_sizes_begin_with_all_weights_and_stay_in_the_models_context():
    model = model_of("/m", {**QWEN3_8B, "max_position_embeddings": 4096}, [])
    assert model.shape == PUBLISHED["Qwen3-8B"]
    tried = list(sizes_for(model, on_gpus=True))
    assert tried[0] == SizeChoice(4096, 8192, lora=False)
    assert {one.max_len for one in tried} == {4096, 2048}
    assert [one.lora for one in tried] == sorted(one.lora for one in tried)
