"""The rules between the fields of a recipe's sections. No I/O.

``problems_between_fields`` reports every broken rule with all the values that it is about; the
models of ``config.recipe`` call it, so no ``Recipe`` that breaks one can exist. A rule between keys
of one section is in that section, and a key that means nothing without another says so itself
(``config.only_with``). The rules of algorithms are in ``core.algorithms``, which config does not
know: whoever loads a recipe hands them to the models, as ``ALGORITHM_RULES`` of the context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from libra_cli.config.errors import did_you_mean
from libra_cli.config.fields import Section
from libra_cli.config.frozen_models import frozen_model_problems, open_node_problems
from libra_cli.config.only_with import misplaced_keys
from libra_cli.config.problems import Problem

if TYPE_CHECKING:
    from libra_cli.config.environment import EnvironmentSpec, EvaluationSpec
    from libra_cli.config.recipe import NodeSpec, Recipe
    from libra_cli.config.rollout import RolloutSpec
    from libra_cli.config.training import TrainingSpec

ALGORITHM_RULES = "algorithm_rules"
"""The key, in the context of a validation, of a function that yields the problems of a recipe."""


def problems_between_fields(recipe: Recipe) -> Iterator[Problem]:
    """Yield every broken rule that is about several fields, with their values in the reason."""
    for path, section in _sections(recipe):
        yield from misplaced_keys(section, path, recipe)
        yield from (problem.inside(path) for problem in section.problems())
    yield from _cluster_problems(recipe)
    yield from _model_problems(recipe)
    yield from _head_problems(recipe.model.fp32_lm_head, recipe.rollout.vllm_args)
    on_cpus = any(not node.gpus for node in recipe.slot_nodes)
    routes = recipe.training.rollout_routes
    yield from _quantization_problems(recipe.rollout, recipe.model.dtype, on_cpus, routes)
    if routes and recipe.rollout.engine == "safe":
        yield Problem(
            ("rollout.engine", "training.rollout_routes"),
            "is safe, which is vLLM's first model runner, and only the second tells the experts of "
            "tokens: leave out one of them",
        )
    if recipe.model.images:
        others = {"agent": recipe.agent, "demonstrations": recipe.demonstrations or None}
        yield from _image_problems(recipe.training, recipe.rollout, recipe.nodes, others)
    yield from _agent_problems(recipe)
    yield from _evaluation_problems(recipe)
    yield from _bucket_problems(recipe)
    yield from _overlong_problems(recipe)
    yield from _curriculum_problems(recipe)
    yield from _update_problems(recipe.training)
    yield from _elastic_problems(recipe)
    yield from _shapes_problems(recipe.rollout, open_nodes=recipe.has_open_nodes)
    yield from _worker_problems(recipe)
    pools = [pool for node in recipe.nodes for pool in node.slot_pools]
    yield from frozen_model_problems(recipe.models, pools, recipe.asked_models)
    if recipe.has_open_nodes:
        yield from open_node_problems(recipe.models)
    if recipe.teacher is not None:
        yield from recipe.teacher.problems_beside(recipe.models, recipe.model.max_len)


def _sections(section: Section, path: str = "") -> Iterator[tuple[str, Section]]:
    """Every section in this one, and itself, with its path."""
    yield path, section
    for name in type(section).model_fields:
        value, key = getattr(section, name), f"{path}.{name}".strip(".")
        if isinstance(value, Section):
            yield from _sections(value, key)
        elif isinstance(value, tuple):
            for index, one in enumerate(value):
                if isinstance(one, Section):
                    yield from _sections(one, f"{key}[{index}]")


def _overlong_problems(recipe: Recipe) -> Iterator[Problem]:
    """A penalty that nobody could get, or that everybody gets."""
    overlong, most = recipe.rollout.overlong, recipe.model.max_len
    if overlong.buffer >= most:
        yield Problem(
            ("rollout.overlong.buffer", "model.max_len"),
            f"is {overlong.buffer}, and model.max_len is {most}: a trajectory would lose reward "
            f"from its first token on; {most // 4} is usual",
        )


def _curriculum_problems(recipe: Recipe) -> Iterator[Problem]:
    """Bounds between which nothing lies, and a pool whose size nobody knows."""
    curriculum = recipe.rollout.curriculum
    if curriculum is None:
        return
    own = [one.name for one in recipe.environment if not one.tasks]
    if own and curriculum.tasks is None:
        yield Problem(
            ("rollout.curriculum.tasks", "environment"),
            f"is not said, and {own[0]!r} makes its tasks without an end: name how many of them "
            "are to be played again and again, for example 1024",
        )


def _evaluation_problems(recipe: Recipe) -> Iterator[Problem]:
    """Evaluations that would play what is trained on, or have nothing to play."""
    for index, one in enumerate(recipe.evaluation):
        key = f"evaluation[{index}]"
        if one.tasks and one.environment is not None:
            yield Problem(
                (f"{key}.tasks", f"{key}.environment"),
                "are for the run's own environment, and this evaluation has another: name them in "
                f"{key}.environment.tasks",
            )
        elif one.tasks and len(recipe.environment) > 1:
            yield Problem(
                (f"{key}.tasks", "environment"),
                f"are for one environment, and the run has {len(recipe.environment)}: name one in "
                f"{key}.environment",
            )
        elif one.environment is None and not one.tasks:
            yield from _same_task_problems(key, recipe)


def _same_task_problems(key: str, recipe: Recipe) -> Iterator[Problem]:
    for number, environment in enumerate(recipe.environment):
        if environment.tasks:
            yield Problem(
                (f"{key}.tasks", f"environment[{number}].tasks"),
                f"are missing, and {environment.name} would be evaluated on the tasks that it "
                "trains on: name files of others",
            )
            return


def held_out_problems(
    trained: Sequence[EnvironmentSpec], evaluations: Sequence[EvaluationSpec]
) -> Iterator[Problem]:
    """Evaluations of what is trained on, in environments that bring their tasks.

    Who reads a recipe to run it asks for them; those of older runs stay readable.
    """
    brought = [(number, one) for number, one in enumerate(trained) if one.brings_tasks]
    for index, one in enumerate(evaluations):
        if one.environment is None and not one.tasks and brought:
            number, played = brought[0]
            key = f"evaluation[{index}].environment"
            yield Problem(
                (key, f"environment[{number}].name"),
                f"is missing, and {played.name} plays the same tasks whatever the seed, so it "
                "would be evaluated on those that it trains on: name one with others, for example "
                "another split by its args",
            )


def _worker_problems(recipe: Recipe) -> Iterator[Problem]:
    known = [node.name for node in recipe.nodes]
    for key, environment in recipe.named_environments:
        for name in environment.workers.nodes if environment.workers else ():
            if name not in known:
                yield _unknown_node(f"{key}.workers.nodes", name, known)


def _cluster_problems(recipe: Recipe) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, node in enumerate(recipe.nodes):
        if node.name in first:
            yield Problem(
                (f"nodes[{index}].host", f"nodes[{first[node.name]}].host"),
                f"{node.name!r} is named twice: use slots to split a host",
            )
        first.setdefault(node.name, index)
    for index, node in enumerate(recipe.nodes):
        if node.only_plays and node.name not in recipe.playing_nodes:
            yield Problem(
                (f"nodes[{index}].pool",),
                "is environments, but nothing is played there: name it in "
                "environment.workers.nodes or agent.nodes",
            )
    local = first.get("local")
    if local is not None and len(recipe.nodes) > 1 and recipe.nodes[local].address is None:
        yield Problem(
            (f"nodes[{local}].address", "nodes"),
            f"is null, but {len(recipe.nodes) - 1} other nodes must reach 'local': "
            "give its address",
        )


def _model_problems(recipe: Recipe) -> Iterator[Problem]:
    model, rollout, training = recipe.model, recipe.rollout, recipe.training
    if (model.path is None) == (model.build is None):
        given = "neither is" if model.path is None else "both are"
        yield Problem(
            ("model", "model.path", "model.build"),
            f"needs exactly one of path and build, {given} given",
        )
    build = model.build
    if training.rollout_routes and build is not None and build.experts is None:
        yield Problem(
            ("training.rollout_routes", "model.build"),
            "is true, but the model of model.build has no experts: give it some "
            "(model.build.experts: 8), or leave it out",
        )
    if rollout.max_turn_tokens >= model.max_len and not recipe.demonstrations:
        yield Problem(
            ("rollout.max_turn_tokens", "model.max_len"),
            f"is {rollout.max_turn_tokens}, but model.max_len is {model.max_len}: "
            "no room for a prompt; lower the first or raise the second",
        )
    if training.micro_batch_tokens < model.max_len:
        yield Problem(
            ("training.micro_batch_tokens", "model.max_len"),
            f"is {training.micro_batch_tokens}, but one trajectory may have model.max_len = "
            f"{model.max_len}; leave it out, or raise it",
        )


def _head_problems(fp32_lm_head: bool, vllm_args: Sequence[str]) -> Iterator[Problem]:
    """Yield overrides of vLLM's that would replace the one for logits in float32."""
    flags = [argument.split("=", 1)[0].replace("_", "-") for argument in vllm_args]
    if fp32_lm_head and "--hf-overrides" in flags:
        yield Problem(
            ("model.fp32_lm_head", f"rollout.vllm_args[{flags.index('--hf-overrides')}]"),
            "is true, which libra tells vLLM by --hf-overrides, and vLLM takes the last of two: "
            "leave out one of them",
        )


def _quantization_problems(
    rollout: RolloutSpec, dtype: str, on_cpus: bool, routes: bool
) -> Iterator[Problem]:
    """Yield weights in fewer bits where their kernels do not run, or beside what was not tried.

    ``on_cpus``: a node has no GPUs; ``routes`` is training.rollout_routes.
    """
    if rollout.quantization is None:
        return
    without = dtype == "auto" and on_cpus
    if dtype == "float32" or without:
        told = "auto, which is float32 on hosts without GPUs" if without else dtype
        yield Problem(
            ("rollout.quantization", "model.dtype"),
            f"is {rollout.quantization}, whose kernels compute in bfloat16, and model.dtype is "
            f"{told}: set model.dtype: bfloat16",
        )
    untried = {
        "rollout.speculative": rollout.speculative is not None,
        "training.rollout_routes": routes,
    }
    for key in (key for key, given in untried.items() if given):
        yield Problem(
            ("rollout.quantization", key),
            f"is {rollout.quantization}, which was not tried with {key}: leave out one of them",
        )


def _image_problems(
    training: TrainingSpec,
    rollout: RolloutSpec,
    nodes: Sequence[NodeSpec],
    others: Mapping[str, object],
) -> Iterator[Problem]:
    """Yield what has not been tried with images, or cannot carry them; ``others`` are values of
    keys of the recipe itself, None where they are not given."""
    auto = training.sharding == "auto" and any(node.gpus for node in nodes)
    sharded = auto or training.sharding == "fsdp2"
    untried = {
        **others,
        "rollout.speculative": rollout.speculative,
        "rollout.quantization": rollout.quantization,
        "training.lora": training.lora,
        "training.cp_size": None if training.cp_size == 1 else training.cp_size,
        "training.tiled_mlp": training.tiled_mlp or None,
        "training.compile": training.compile or None,
    }
    for key in (key for key, given in untried.items() if given is not None):
        yield Problem(("model.images", key), f"is true, and was not tried with {key}: leave it out")
    if sharded:
        yield Problem(
            ("model.images", "training.sharding"),
            "is true, and ranks that share a model could wait for those whose rows have no image: "
            "set training.sharding: ddp",
        )
    for index, node in enumerate(nodes):
        if "hybrid" in (node.pool or ()):
            yield Problem(
                ("model.images", f"nodes[{index}].pool"),
                "is true, and gradient workers get no images: make the pool auto, train or rollout",
            )


def _agent_problems(recipe: Recipe) -> Iterator[Problem]:
    agent = recipe.agent
    if agent is None:
        return
    known = [node.name for node in recipe.nodes]
    for name in agent.nodes:
        if name not in known:
            yield _unknown_node("agent.nodes", name, known)
    if agent.in_sandbox:
        for index, environment in enumerate(recipe.environment):
            yield from _no_place_for_agents(f"environment[{index}]", environment)
        for index, one in enumerate(recipe.evaluation):
            if one.environment is not None:
                yield from _no_place_for_agents(f"evaluation[{index}].environment", one.environment)


def _no_place_for_agents(key: str, environment: EnvironmentSpec) -> Iterator[Problem]:
    """An environment in whose sandbox no agent can run."""
    if environment.sandbox is None or environment.sandbox.backend == "none":
        yield Problem(
            ("agent.in_sandbox", f"{key}.sandbox"),
            f"is true, but {key} has no sandbox: add {key}.sandbox: {{}} (libra help sandboxes)",
        )
    elif environment.workers is not None and environment.workers.nodes:
        yield Problem(
            ("agent.in_sandbox", f"{key}.workers.nodes"),
            f"is true, but sandboxes on other hosts do not reach the endpoint of agents yet: leave "
            f"out {key}.workers.nodes, or run agents on agent.nodes without a sandbox",
        )


def _unknown_node(key: str, name: str, known: list[str]) -> Problem:
    return Problem((key, "nodes"), f"there is no node {name!r}{did_you_mean(name, known)}")


def _bucket_problems(recipe: Recipe) -> Iterator[Problem]:
    longest = 0
    for index, bucket in enumerate(recipe.rollout.buckets or ()):
        bound = bucket.up_to_tokens or recipe.model.max_len
        if not longest <= bound <= recipe.model.max_len:
            yield Problem(
                (f"rollout.buckets[{index}].up_to_tokens", "model.max_len"),
                f"is {bound}, but buckets are ordered short to long up to model.max_len: it must "
                f"be within {longest} and {recipe.model.max_len}",
            )
        longest = max(longest, bound)


def _shapes_problems(rollout: RolloutSpec, *, open_nodes: bool) -> Iterator[Problem]:
    """Servers of several shapes where slots or buckets leave no choice of them."""
    if rollout.shapes == "alike":
        return
    if not open_nodes:
        yield Problem(
            ("rollout.shapes", "nodes"),
            f"is {rollout.shapes}, but a server is as large as its slot, and not all nodes leave "
            "their slots to the planner: give nodes GPUs and no slots, pool or share, or say the "
            "shapes in rollout.buckets",
        )
    degrees = {bucket.tensor_parallel for bucket in rollout.buckets or ()}
    if len(degrees) == 1:
        yield Problem(
            ("rollout.shapes", "rollout.buckets"),
            f"is {rollout.shapes}, but all buckets have a tensor_parallel of {min(degrees)}: leave "
            "buckets out, or name another size in them",
        )


def _update_problems(training: TrainingSpec) -> Iterator[Problem]:
    """Several updates of a batch that cannot be had."""
    if training.minibatches > training.groups_per_step:
        yield Problem(
            ("training.minibatches", "training.groups_per_step"),
            f"is {training.minibatches}, but a batch of {training.groups_per_step} groups is split "
            "by groups: lower the first or raise the second",
        )
    if training.stream and training.updates > 1:
        yield Problem(
            ("training.stream", "training.minibatches", "training.epochs"),
            f"adds up the gradients of one update while trajectories are played, but a batch has "
            f"{training.updates}: leave it out, or have one minibatch and one epoch",
        )
    yield from _optimizer_problems(training)


def _optimizer_problems(training: TrainingSpec) -> Iterator[Problem]:
    """An optimizer that the model is not laid out for."""
    if training.optimizer == "muon" and (training.sharding != "ddp" or training.lora is not None):
        wrong = "lora" if training.lora is not None else "sharding"
        yield Problem(
            ("training.optimizer", f"training.{wrong}"),
            "is muon, which moves whole matrices of the model: "
            + ("leave out training.lora" if training.lora else "set training.sharding: ddp"),
        )


def _elastic_problems(recipe: Recipe) -> Iterator[Problem]:
    """Slots that would be borrowed from a trainer that never waits."""
    for index, node in enumerate(recipe.nodes):
        if recipe.training.stream and node.share and node.share.serve == "when-idle":
            yield Problem(
                (f"nodes[{index}].share.serve", "training.stream"),
                "is when-idle, but with stream the trainer begins a step before its batch is full: "
                "leave one of them out",
            )
