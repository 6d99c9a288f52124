"""Which slots serve frozen models, what the planner is left with, and what is started there."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from libra_cli.config.frozen_models import KEY, ModelsAddress
from libra_cli.config.recipe import Recipe
from libra_cli.core.frozen.process import frozen_process
from libra_cli.core.frozen.slots import frozen_slots
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.launch.process import HostFacts
from libra_cli.core.preflight.dry_run import dry_run

ARGS = {"judge": {"served": "judge", "scale": [0, 10]}, "others": [{"served": "customer"}]}


def recipe(**more: object) -> Recipe:
    given: dict[str, object] = {
        "nodes": [
            {"host": "a", "gpus": 4, "slots": 2, "pool": ["train", "models"]},
            {"host": "b", "gpus": 4, "slots": 4, "pool": ["rollout", "models", "auto", "models"]},
        ],
        "model": {"path": "/policy", "max_len": 1024},
        "rollout": {"buckets": [{"tensor_parallel": 1}]},
        "environment": {"name": "m:E", "args": ARGS},
        "models": [
            {"name": "judge", "path": "~/judge", "slots": 2, "max_len": 4096},
            {"name": "customer", "path": "/c", "vllm_args": ["--tool-call-parser", "hermes"]},
        ],
    }
    return Recipe.model_validate(given | more)


def test_slots_are_dealt_in_the_recipes_order_and_keep_their_gpus() -> None:
    made = recipe()
    found = frozen_slots(made.models, made.nodes)
    assert [(one.model.name, one.slot.id, one.slot.gpus, one.process) for one in found] == [
        ("judge", "a/1", (2, 3), "model-1"),
        ("judge", "b/1", (1,), "model-1"),
        ("customer", "b/3", (3,), "model-3"),
    ]


def test_the_planner_has_all_others_and_these_keep_their_names() -> None:
    made = recipe()
    assert [slot.id for slot in slots_of(made)] == ["a/0", "b/0", "b/2"]
    plan = initial_plan(made)
    assert {*plan.train, *(slot for slot, _ in plan.servers)} == {"a/0", "b/0", "b/2"}


def test_nodes_stay_the_planners_to_cut_up_beside_a_host_of_frozen_models() -> None:
    nodes = [{"host": "a", "gpus": 8}, {"host": "b", "gpus": 3, "slots": 3, "pool": "models"}]
    made = recipe(nodes=nodes, rollout={})
    assert made.has_open_nodes
    assert {slot.node for slot in slots_of(made)} == {"a"}


def test_a_server_listens_on_a_socket_of_the_run_and_sees_its_own_gpus_alone() -> None:
    made = recipe()
    facts = HostFacts("a", "/py", "/work", "/run", "/dev/shm/libra-u", "a", tmp_dir="/tmp/r")
    spec = frozen_process(frozen_slots(made.models, made.nodes)[0], facts, path="/home/u/judge")
    assert spec.argv[:3] == ("/py", "-m", "libra_cli.node.frozen_model")
    flags = dict(zip(spec.argv[3::2], spec.argv[4::2], strict=True))
    assert flags == {
        "--uds": "/tmp/r/sockets/model-1.sock",
        "--model": "/home/u/judge",
        "--served-model-name": "judge",
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "2",
        "--max-model-len": "4096",
    }
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in spec.env


def test_a_dry_run_shows_them_with_the_rest() -> None:
    _, second = dry_run(recipe())
    assert [(slot.id, told) for slot, told in second.slots][-2:] == [
        ("b/1", "model: judge"),
        ("b/3", "model: customer"),
    ]
    last = next(one for one in second.processes if one.process == "model-3")
    assert last.argv[-2:] == ("--tool-call-parser", "hermes")


def test_what_asks_is_told_where_they_answer_and_the_recipe_says_so_no_longer() -> None:
    address = ModelsAddress("http://127.0.0.1:5", SecretStr("word"))
    told = recipe(
        teacher={"served": "judge"}, training={"loss": "distill"}, rollout={"buckets": None}
    ).served_at(address)
    judge = {"url": "http://127.0.0.1:5/judge/v1", "model": "judge", "api_key": KEY}
    customer = {"url": "http://127.0.0.1:5/customer/v1", "model": "customer", "api_key": KEY}
    (environment,) = told.environment
    assert environment.args == {"judge": {"scale": [0, 10], **judge}, "others": [customer]}
    assert environment.secrets[KEY] == address.token
    assert told.teacher is not None
    assert (told.teacher.url, told.teacher.model) == (judge["url"], "judge")
    assert told.teacher.api_key == address.token
    assert told.asked_models == {}


@pytest.mark.parametrize("count", [1, 3])
def test_a_recipe_without_models_is_what_it_was(count: int) -> None:
    made = Recipe.model_validate(
        {"nodes": [{"host": "local", "slots": count + 1}], "model": {"path": "/m"}}
    )
    address = ModelsAddress("http://127.0.0.1:5", SecretStr("word"))
    assert made.served_at(address) == made
    assert frozen_slots(made.models, made.nodes) == ()


def test_an_agent_asks_for_models_by_name() -> None:
    made = {
        "nodes": [{"host": "local", "slots": 3, "pool": ["rollout", "train", "models"]}],
        "model": {"path": "/m"},
        "models": [{"name": "judge", "path": "/judge"}],
    }
    agent = {"command": "solve", "served": "judge"}
    assert Recipe.model_validate({**made, "agent": agent}).asked_models == {
        "agent.served[0]": "judge"
    }
    with pytest.raises(ValueError, match=r"there is no model 'jugde'; did you mean 'judge'"):
        Recipe.model_validate({**made, "agent": {**agent, "served": ["judge", "jugde"]}})
    with pytest.raises(ValueError, match=r"an earlier one would both be LIBRA_MODEL_MY_JUDGE_URL"):
        Recipe.model_validate({**made, "agent": {**agent, "served": ["my-judge", "my.judge"]}})
