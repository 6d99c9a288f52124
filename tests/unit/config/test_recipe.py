"""A wrong recipe is refused with every problem at once, each with its line.

The cases are files: ``bad_recipes/NAME.yaml`` and the lines expected for it, without the path, in
``bad_recipes/NAME.expected``. To add a case, add the two files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.algorithms import LOSSES
from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import RecipeError
from libra_cli.config.host_ranges import expand_range
from libra_cli.config.problems import Problem
from libra_cli.config.recipe import Recipe
from libra_cli.config.rollout import RESERVED_VLLM_FLAGS
from libra_cli.config.secrets import known_secrets
from libra_cli.config.training import TrainingSpec
from libra_cli.core.algorithms.base import Advantage
from libra_cli.core.algorithms.grpo import grpo
from libra_cli.envs.registry import ENVIRONMENTS
from libra_cli.runtime.recipes.loader import load_recipe

BAD = Path(__file__).parent / "bad_recipes"
CASES = sorted(path.stem for path in BAD.glob("*.yaml"))
ENVIRONMENT = {"GIVEN": "top-secret", "EMPTY": ""}
SMALLEST = "nodes:\n  - {host: local, slots: 2}\nmodel: {build: {}}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ENVIRONMENT)
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_every_problem_is_reported_with_its_line(name: str) -> None:
    path = BAD / f"{name}.yaml"
    lines = refusal(path).splitlines()
    assert all(line.startswith(f"{path}:") for line in lines)
    found = [line.removeprefix(f"{path}:").replace(str(BAD), "DIRECTORY") for line in lines]
    for known, word in ((LOSSES, "LOSSES"), (ENVIRONMENTS, "ENVIRONMENTS")):
        found = [line.replace(", ".join(known.shipped), word) for line in found]
    assert found == (BAD / f"{name}.expected").read_text(encoding="utf-8").splitlines()


def _in_pairs(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.group_size != 2:
        yield Problem(("rollout.group_size", "training.advantage"), "is not 2")


IN_PAIRS = Advantage(grpo, _in_pairs)


def test_an_advantage_of_a_users_own_brings_its_rules(tmp_path: Path) -> None:
    text = SMALLEST + f"training: {{advantage: '{__name__}:IN_PAIRS', loss: sft}}\n"
    path = write(tmp_path, text + "rollout: {group_size: 3}\n")
    found = [line.removeprefix(f"{path}:") for line in refusal(path).splitlines()]
    assert [line.split(": ")[:2] for line in found] == [
        ["4", "training.loss"],
        ["5", "rollout.group_size"],
    ]
    right = text.replace(", loss: sft", "") + "rollout: {group_size: 2}\n"
    assert load_recipe(write(tmp_path, right), {}).rollout.group_size == 2


def test_every_case_has_both_files() -> None:
    assert sorted(path.stem for path in BAD.glob("*.expected")) == CASES


def test_a_refusal_says_what_to_type_next(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST + "run: {sed: 1, stepps: 2}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, {})
    assert caught.value.hint == f"fix the 2 problems, then: libra run --dry-run {path}"
    assert caught.value.exit_code == 2


def test_no_secret_is_in_a_refusal() -> None:
    text = refusal(BAD / "secrets.yaml")
    assert "hunter2" not in text
    assert "12345" not in text
    assert "top-secret" not in text


def test_a_secret_is_read_and_never_shown(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST + "environment: {secrets: {KEY: '${GIVEN}'}}\n")
    recipe = load_recipe(path, ENVIRONMENT)
    assert recipe.environment[0].secrets["KEY"].get_secret_value() == "top-secret"
    assert "top-secret" not in repr(recipe)
    assert "top-secret" not in recipe.model_dump_json()


def test_the_key_of_a_teacher_is_read_from_the_environment_and_never_shown(tmp_path: Path) -> None:
    text = SMALLEST + (
        "teacher: {url: 'http://t:8000/v1', api_key: '${GIVEN}'}\ntraining: {loss: distill}\n"
    )
    recipe = load_recipe(write(tmp_path, text), ENVIRONMENT)
    assert recipe.teacher is not None
    assert recipe.teacher.api_key is not None
    assert recipe.teacher.api_key.get_secret_value() == "top-secret"
    assert "top-secret" not in repr(recipe) + recipe.model_dump_json()
    assert known_secrets(recipe) == ["top-secret"]
    absent = refusal(write(tmp_path, text.replace("GIVEN", "ABSENT")))
    assert "teacher.api_key: the environment has no ABSENT; type: export ABSENT=..." in absent
    elsewhere = refusal(write(tmp_path, text.replace("http://t:8000/v1", "http://${GIVEN}/v1")))
    assert "${GIVEN} is only replaced in teacher.api_key" in elsewhere


def test_a_missing_file_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read: No such file") as caught:
        load_recipe(tmp_path / "nothing.yaml", {})
    assert caught.value.hint


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"run: \xff\n")
    assert "is not UTF-8" in refusal(path)


def test_a_recipe_directory_is_an_error(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path)


def test_ranges_expand_in_order_with_their_addresses(tmp_path: Path) -> None:
    text = (
        "nodes:\n"
        "  - {host: 'gpu-[01-03]', address: '10.0.0.[11-13]', gpus: 8}\n"
        "  - {host: 'big-[a]', gpus: 8}\n"
    )
    text = text.replace("big-[a]", "big-[7,9]") + "model: {path: /m}\n"
    text += "rollout: {buckets: [{tensor_parallel: 8}]}\n"
    recipe = load_recipe(write(tmp_path, text), {})
    assert [(node.name, node.reach) for node in recipe.nodes] == [
        ("gpu-01", "10.0.0.11"),
        ("gpu-02", "10.0.0.12"),
        ("gpu-03", "10.0.0.13"),
        ("big-7", "big-7"),
        ("big-9", "big-9"),
    ]


def test_numbers_and_words_are_read_as_they_look(tmp_path: Path) -> None:
    text = SMALLEST + (
        "training: {learning_rate: 2e-4, kl_coef: 1, normalize_std: False}\n"
        "environment: {args: {a: on, b: 010, c: 12:30, d: ~, e: 1_0}}\n"
    )
    recipe = load_recipe(write(tmp_path, text), {})
    assert recipe.training.learning_rate == 2e-4
    assert recipe.training.kl_coef == 1.0
    assert recipe.training.scale_rewards == "none", "normalize_std is its old name"
    assert recipe.environment[0].args == {"a": "on", "b": 10, "c": "12:30", "d": None, "e": "1_0"}


def test_tasks_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n", encoding="utf-8")
    recipe = load_recipe(write(tmp_path, SMALLEST + "environment: {tasks: tasks.jsonl}\n"), {})
    assert [source.path for source in recipe.environment[0].tasks] == [
        str((tmp_path / "tasks.jsonl").resolve())
    ]


def test_tasks_are_a_path_or_a_mapping_or_a_list_of_either(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "more.jsonl").write_text("{}\n", encoding="utf-8")
    mapping = "{path: gsm8k, split: test, shuffle: true, limit: 5}"
    one = load_recipe(write(tmp_path, SMALLEST + f"environment: {{tasks: {mapping}}}\n"), {})
    assert [(source.split, source.limit) for source in one.environment[0].tasks] == [("test", 5)]
    both = f"environment: {{tasks: [{mapping}, more.jsonl]}}\n"
    two = load_recipe(write(tmp_path, SMALLEST + both), {}).environment[0].tasks
    assert [Path(source.path).name for source in two] == ["gsm8k", "more.jsonl"]
    assert two[0] == one.environment[0].tasks[0]


def test_the_tasks_of_an_older_run_are_read() -> None:
    assert EnvironmentSpec.model_validate_json('{"tasks": null}').tasks == ()
    (source,) = EnvironmentSpec.model_validate_json('{"tasks": "/a/tasks.jsonl"}').tasks
    assert (source.path, source.shuffle, source.weight) == ("/a/tasks.jsonl", False, 1.0)


def test_a_recipe_survives_a_round_trip_through_json(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST), {})
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_a_recipe_cannot_be_changed(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST), {})
    with pytest.raises(ValueError, match="frozen"):
        recipe.run.steps = 3


def test_one_pool_word_is_for_every_slot() -> None:
    recipe = Recipe.model_validate(
        {
            "nodes": [
                {"host": "a", "gpus": 4, "slots": 2, "pool": "rollout"},
                {"host": "b", "pool": ["train"]},
            ],
            "model": {"path": "/m"},
        }
    )
    assert recipe.node("a").slot_pools == ("rollout", "rollout")
    assert recipe.node("b").slot_pools == ("train",)


def test_gpus_may_be_listed_by_index_or_by_uuid(tmp_path: Path) -> None:
    listed = load_recipe(
        write(tmp_path, SMALLEST.replace("slots: 2", "gpus: [6, 4, GPU-5f0c2a5e]")), {}
    )
    (node,) = listed.nodes
    assert (node.gpus, node.gpu_ids) == (3, ("6", "4", "GPU-5f0c2a5e"))
    assert Recipe.model_validate(listed.model_dump(mode="json")) == listed


@pytest.mark.parametrize("gpus", ["[4, 4]", "[first]", "[-1]", "[true]"])
def test_a_list_of_gpus_names_each_once(tmp_path: Path, gpus: str) -> None:
    with pytest.raises(RecipeError):
        load_recipe(write(tmp_path, SMALLEST.replace("slots: 2", f"gpus: {gpus}")), {})


def test_reserved_flags_are_spelled_like_flags() -> None:
    assert all(flag.startswith("--") and "_" not in flag for flag in RESERVED_VLLM_FLAGS)


@given(first=st.integers(0, 500), count=st.integers(1, 50), width=st.integers(1, 6))
def test_a_range_names_every_number_once(first: int, count: int, width: int) -> None:
    numbers = [str(number).zfill(width) for number in range(first, first + count)]
    names = expand_range(f"n[{numbers[0]}-{numbers[-1]}].x")
    assert len(set(names)) == count
    assert [int(name[1:-2]) for name in names] == list(range(first, first + count))


@given(text=st.text(max_size=200))
def test_any_text_is_a_recipe_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", newline="", errors="surrogatepass")
    with pytest.raises(RecipeError):
        load_recipe(path, {})


def test_a_recipe_that_still_says_algorithm_means_its_loss(tmp_path: Path) -> None:
    old = load_recipe(write(tmp_path, SMALLEST + "training: {algorithm: grpo}\n"), {})
    assert old == load_recipe(write(tmp_path, SMALLEST), {})
    assert old.training.loss == "dapo"


def test_a_loss_of_an_import_path_is_not_looked_for_on_the_controller(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST + "training: {loss: 'only.on_hosts:mine'}\n"), {})
    assert recipe.training.loss == "only.on_hosts:mine"


SEVERAL = """
environment:
  - {name: calculator, weight: 3, secrets: {KEY: '${GIVEN}'}}
  - {name: calculator, args: {stories: true}}
  - {name: pointer-chase, label: chase}
"""


def test_there_may_be_several_environments_with_names_of_their_own(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST + SEVERAL), ENVIRONMENT)
    assert recipe.environment_labels == ("calculator", "calculator-2", "chase")
    assert [one.weight for one in recipe.environment] == [3, 1, 1]
    assert recipe.environment[0].secrets["KEY"].get_secret_value() == "top-secret"


def test_a_problem_of_one_of_several_environments_says_which(tmp_path: Path) -> None:
    wrong = SEVERAL.replace("weight: 3", "weight: 0").replace("${GIVEN}", "${ABSENT}")
    path = write(tmp_path, SMALLEST + wrong.replace("label:", "label_:"))
    absent = "environment[0].secrets.KEY: the environment has no ABSENT"
    assert refusal(path).splitlines() == [
        f"{path}:6: {absent}; type: export ABSENT=...",
        f"{path}:6: environment[0].weight: must be greater than 0, got 0",
        f"{path}:8: environment[2].label_: unknown key; did you mean 'label'?",
    ]


def test_one_environment_is_told_as_recipes_have_it(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST + "environment: {name: calculator}\n"), {})
    told = recipe.model_dump(mode="json", exclude_defaults=True)
    assert told["environment"] == {"name": "calculator"}
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    several = load_recipe(write(tmp_path, SMALLEST + SEVERAL), ENVIRONMENT)
    assert len(several.model_dump(mode="json")["environment"]) == 3


def test_workers_are_a_number_or_a_mapping_with_nodes_that_exist(tmp_path: Path) -> None:
    def workers(text: str) -> str:
        return SMALLEST + f"environment: {{workers: {text}}}\n"

    def read(text: str) -> tuple[int, tuple[str, ...]]:
        spec = load_recipe(write(tmp_path, workers(text)), {}).environment[0].workers
        assert spec is not None
        return spec.processes, spec.nodes

    assert read("3") == (3, ())
    assert read("{processes: 2, nodes: [local]}") == (2, ("local",))
    assert read("{nodes: local}") == (4, ("local",))
    path = write(tmp_path, workers("{nodes: [locl]}"))
    assert refusal(path).splitlines() == [
        f"{path}:4: environment.workers.nodes: there is no node 'locl'; did you mean 'local'?"
    ]
    path = write(tmp_path, workers("0"))
    assert "environment.workers.processes: must be greater than or equal to 1" in refusal(path)


def test_recipes_of_older_runs_that_evaluate_what_they_train_stay_readable() -> None:
    told = yaml.safe_load((BAD / "evaluation_of_a_pool.yaml").read_text())
    assert Recipe.model_validate(told).evaluation[0].environment is None
    load_recipe(BAD / "evaluation_of_a_pool.yaml", plays=False)  # as libra ps and gc do


def test_the_checkpoint_before_the_newest_always_stays() -> None:
    kept = {number: TrainingSpec(keep_checkpoints=number).checkpoints_kept for number in (1, 2, 5)}
    assert kept == {1: 2, 2: 2, 5: 5}
