"""Given these hosts, exactly these commands.

The cases are files: ``commands/NAME.json`` has a recipe, what the hosts say of themselves, and the
processes of the initial plan. To add a case, write ``why``, ``recipe`` and ``facts``, run the test,
read what it prints, and only then put it under ``expected``. ``shape`` is a published model whose
sizes are known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libra_cli.config.recipe import Recipe
from libra_cli.config.rollout import RESERVED_VLLM_FLAGS
from libra_cli.core.costs.architecture import published
from libra_cli.core.launch.model import model_process
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.launch.ports import ports_needed
from libra_cli.core.launch.process import HostFacts, ProcessSpec, process_of
from libra_cli.core.launch.rollout_backend import server_process
from libra_cli.core.launch.trainer_backend import TrainerLaunch, trainer_processes
from libra_cli.core.preflight.dry_run import dry_run, masked
from libra_cli.core.types import Bucket

CASES = sorted((Path(__file__).parent / "commands").glob("*.json"))


def facts_of(case: dict[str, Any]) -> dict[str, HostFacts]:
    return {node: HostFacts(node=node, **values) for node, values in case["facts"].items()}


def processes(case: dict[str, Any]) -> list[ProcessSpec]:
    recipe = Recipe.model_validate(case["recipe"])
    facts = facts_of(case)
    plan = initial_plan(recipe)
    slots = {slot.id: slot for slot in slots_of(recipe)}
    specs = [model_process(recipe, facts[recipe.nodes[0].name])]
    for slot, bucket in plan.servers:
        there = facts[slots[slot].node]
        shape = published(case.get("shape", ""))
        spec = server_process(
            recipe, slots[slot], bucket, there, model_dir="/models/m", shape=shape
        )
        specs.append(spec)
    train = tuple(slots[slot] for slot in plan.train)
    launch = TrainerLaunch(
        train=train,
        facts=facts,
        run_id="r1",
        rendezvous_port=21101,
        model_dirs={slot.node: "/models/m" for slot in train},
        trainer_incarnation=2,
        resume={slot.node: f"/checkpoints/{slot.node}" for slot in train},
    )
    specs += trainer_processes(recipe, launch)
    return specs


def readable(spec: ProcessSpec) -> dict[str, Any]:
    files: dict[str, Any] = {
        name: json.loads(text) if name.endswith(".json") else text.splitlines()
        for name, text in spec.files.items()
    }
    if "trainer.json" in files:
        # Every field of the recipe's training section; its defaults are tested there.
        files["trainer.json"].pop("training")
    return {
        "node": spec.node,
        "process": spec.process,
        "argv": " ".join(spec.argv),
        "env": dict(sorted(spec.env.items())),
        "files": files,
        "ports": dict(spec.ports),
    }


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_hosts_get_exactly_these_processes(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    found = [readable(spec) for spec in processes(case)]
    assert found == case["expected"], json.dumps(found, indent=1)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_no_flag_of_ours_can_be_given_twice(path: Path) -> None:
    """What a recipe may not put into vllm_args is everything a server already has."""
    for spec in processes(json.loads(path.read_text(encoding="utf-8"))):
        if spec.process.startswith("server"):
            flags = {word for word in spec.argv if word.startswith("--")}
            extra = {"--generation-config", "--kv-cache-dtype=fp8", "--language-model-only"}
            assert flags - extra <= RESERVED_VLLM_FLAGS


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_process_has_its_temporary_files_where_the_runs_end_removes_them(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    for facts in case["facts"].values():
        facts["tmp_dir"] = "/tmp/libra-3x"
    assert {spec.env["TMPDIR"] for spec in processes(case)} == {"/tmp/libra-3x"}


@pytest.mark.parametrize(("name", "there"), [("r" * 45, True), ("r" * 60, False)])
def test_sockets_are_where_the_run_ends_them_if_linux_takes_the_path(name, there) -> None:
    recipe = Recipe.model_validate({"nodes": [{"host": "n1"}], "model": {"path": "/m"}})
    slot = slots_of(recipe)[0]
    facts = HostFacts("n1", "py", "/w", f"/w/runs/{name}/n1", "/dev/shm/libra-somebody", "n1")
    spec = server_process(recipe, slot, Bucket("all", 1, 8, 512), facts, model_dir="/m")
    wanted = f"/dev/shm/libra-somebody/{name}" if there else None
    assert spec.env.get("VLLM_RPC_BASE_PATH") == wanted


def test_servers_and_trainer_are_told_of_logits_in_float32() -> None:
    case = json.loads(CASES[0].read_text(encoding="utf-8"))
    told = []
    for fp32 in (False, True):
        case["recipe"]["model"]["fp32_lm_head"] = fp32
        specs = processes(case)
        argv = [spec.argv for spec in specs if spec.process.startswith("server")]
        texts = [
            spec.files[name] for spec in specs for name in spec.files if name == "trainer.json"
        ]
        heads = [json.loads(text).get("fp32_lm_head", False) for text in texts]
        told.append((['{"head_dtype": "float32"}' in one for one in argv], heads))
    (servers, trainers), (served, trained) = told
    assert servers
    assert trainers
    assert not any(servers + trainers)
    assert all(served + trained)


def test_two_servers_never_have_the_same_seed() -> None:
    case = {
        "recipe": {
            "nodes": [
                {"host": "a", "slots": 4, "pool": "rollout"},
                {"host": "b", "slots": 4, "pool": ["rollout", "rollout", "rollout", "train"]},
            ],
            "model": {"path": "/m"},
        },
        "facts": {
            node: {
                "python": "p",
                "workdir": "w",
                "run_dir": "runs/r/a",
                "weights_dir": "d",
                "address": node,
            }
            for node in "ab"
        },
    }
    seeds = [
        spec.argv[spec.argv.index("--seed") + 1]
        for spec in processes(case)
        if spec.process.startswith("server")
    ]
    assert len(set(seeds)) == len(seeds) == 7


@pytest.mark.parametrize("replay", [False, True])
def test_servers_are_asked_for_experts_where_these_are_replayed(replay: bool) -> None:
    case = json.loads(CASES[0].read_text(encoding="utf-8"))
    case["recipe"]["training"] = {
        **case["recipe"].get("training", {}),
        "rollout_routes": replay,
    }
    flag = "--enable-return-routed-experts"
    servers = [spec for spec in processes(case) if spec.process.startswith("server")]
    assert servers
    assert all((flag in spec.argv) == replay for spec in servers)
    assert flag in RESERVED_VLLM_FLAGS


def test_a_head_is_named_to_servers_and_schedules_no_step_before_the_last_ends() -> None:
    case = json.loads(CASES[0].read_text(encoding="utf-8"))
    for given in ({"method": "ngram"}, {"method": "eagle", "model": "/m/head"}, {"method": "mtp"}):
        rollout = case["recipe"].get("rollout", {})
        case["recipe"]["rollout"] = {**rollout, "speculative": given}
        servers = [spec for spec in processes(case) if spec.process.startswith("server")]
        for argv in (spec.argv for spec in servers):
            told = json.loads(argv[argv.index("--speculative-config") + 1])
            assert {key: told.get(key) for key in given} == given
            assert told["num_speculative_tokens"] == 3
            assert ("--no-async-scheduling" in argv) == (given["method"] != "ngram")
        assert servers


@pytest.mark.parametrize("engine", ["fast", "safe"])
def test_a_safe_engine_has_nothing_that_vllm_does_on_gpus_alone(engine: str) -> None:
    case = json.loads((CASES[0].parent / "two-gpus-of-one-host.json").read_text(encoding="utf-8"))
    case["recipe"].setdefault("rollout", {})["engine"] = engine
    servers = [spec for spec in processes(case) if spec.process.startswith("server")]
    assert servers
    for spec in servers:
        safe = engine == "safe"
        assert ("--no-async-scheduling" in spec.argv) == safe
        assert (spec.env.get("VLLM_USE_V2_MODEL_RUNNER") == "0") == safe
        told = " ".join(spec.argv)
        assert ('--compilation-config {"cudagraph_mode": "NONE"}' in told) == safe


def test_the_trainer_gets_the_whole_training_section() -> None:
    case = json.loads(CASES[0].read_text(encoding="utf-8"))
    recipe = Recipe.model_validate(case["recipe"])
    trainer = next(spec for spec in processes(case) if spec.process == "trainer-0")
    config = json.loads(trainer.files["trainer.json"])
    assert config["training"] == recipe.training.model_dump(mode="json")


@pytest.mark.parametrize("compile_", [False, True])
def test_what_a_trainer_compiles_outlives_its_run(compile_: bool) -> None:
    case = json.loads(CASES[0].read_text(encoding="utf-8"))
    case["recipe"].setdefault("training", {})["compile"] = compile_
    trainer = next(spec for spec in processes(case) if spec.process == "trainer-0")
    workdir = facts_of(case)[trainer.node].workdir
    wanted = f"{workdir}/cache/inductor" if compile_ else None
    assert trainer.env.get("TORCHINDUCTOR_CACHE_DIR") == wanted
    assert json.loads(trainer.files["trainer.json"])["cp_size"] == 1


def test_the_first_train_node_has_the_ports_the_others_meet_at() -> None:
    recipe = Recipe.model_validate(
        {
            "nodes": [
                {"host": "a", "slots": 2, "pool": "rollout"},
                {"host": "b", "pool": "train"},
                {"host": "c", "pool": "train"},
            ],
            "model": {"path": "/m"},
        }
    )
    assert ports_needed(recipe, initial_plan(recipe)) == {
        "a": ("weights",),
        "b": ("rendezvous", "weights"),
        "c": ("weights",),
    }


def test_versions_travel_by_no_port_on_the_only_node() -> None:
    node = {"host": "a", "slots": 2, "pool": ["train", "rollout"]}
    recipe = Recipe.model_validate({"nodes": [node], "model": {"path": "/m"}})
    assert ports_needed(recipe, initial_plan(recipe)) == {"a": ("rendezvous",)}


def test_a_server_is_named_after_its_slot() -> None:
    assert process_of("gpu-01/3") == "server-3"


def test_values_that_sound_secret_are_masked() -> None:
    env = {"HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "API_KEY": "x", "DB_PASSWORD": "x"}
    open_ones = {"LIBRA_TOKEN_FILE": "/f", "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "de"}
    shown = masked(env | open_ones)
    assert all(shown[name] == "******" for name in env)
    assert all(shown[name] == value for name, value in open_ones.items())


def test_a_dry_run_shows_no_secret() -> None:
    recipe = Recipe.model_validate(
        {
            "nodes": [{"host": "local", "slots": 2}],
            "model": {"path": "/m"},
            "environment": {"secrets": {"KEY": "hunter3"}},
        }
    )
    text = repr([plan.processes for plan in dry_run(recipe)])
    assert "libra_cli.node.rollout.server" in text
    assert "hunter" not in text


def test_a_dry_run_uses_what_is_known_of_a_host() -> None:
    recipe = Recipe.model_validate(
        {"nodes": [{"host": "local", "slots": 2}], "model": {"path": "/m"}}
    )
    facts = HostFacts("local", "/opt/py", "/w", "/w/r", "/shm", "127.0.0.1", cpus=4)
    (host,) = dry_run(recipe, {"local": facts})
    assert {spec.argv[0] for spec in host.processes} == {"/opt/py"}
    assert "<" not in repr([spec.argv for spec in host.processes])


def test_servers_have_the_tower_only_where_prompts_have_images() -> None:
    flags = {}
    for images in (False, True):
        model = {"path": "/m", "images": images}
        recipe = Recipe.model_validate({"nodes": [{"host": "n1"}], "model": model})
        slot = slots_of(recipe)[0]
        facts = HostFacts("n1", "py", "/w", "/w/runs/r/n1", "/dev/shm/libra-somebody", "n1")
        spec = server_process(recipe, slot, Bucket("all", 1, 8, 512), facts, model_dir="/m")
        flags[images] = spec.argv
    assert "--language-model-only" in flags[False]
    assert "--language-model-only" not in flags[True]
    # Or vLLM would scale patches again that are scaled already.
    assert "--no-mm-device-do-normalize" in flags[True]
