"""The rules between the fields of a recipe's sections. No I/O.

``problems_between_fields`` reports every broken rule with all the values that it is about; the
models of ``config.recipe`` call it, so no ``Recipe`` that breaks one can exist. A rule between keys
of one section is in that section, and a key that means nothing without another says so itself
(``config.only_with``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from libra_cli.config.algorithms import advantages_with
from libra_cli.config.errors import did_you_mean
from libra_cli.config.fields import Section
from libra_cli.config.only_with import misplaced_keys
from libra_cli.config.problems import Problem
from libra_cli.config.secrets import SECRET_IN_URL

if TYPE_CHECKING:
    from libra_cli.config.recipe import Recipe
    from libra_cli.config.training import TrainingSpec

_UNDISCOUNTED = frozenset(advantages_with(turns=False))
"""Estimators that have no use for ``training.gamma``; one of a user's may have."""

_PLAYED = ("environment", "agent", "evaluation", "replay", "rollout", "scheduler", "teacher")
"""Sections that are for what the policy plays."""
_PLAYED_IN_TRAINING = (
    *("loss_args", "kl_coef", "kl_estimator", "entropy_coef", "stream", "staleness"),
    *("advantage", "gamma", "lam", "critic", "scale_rewards"),
    *("sampler_correction", "tis_cap", "tis_floor", "clip_low", "clip_high"),
)
"""Keys of ``training`` that are for what is played: rewards, and ratios to who generated a token.
One that has its default is not given."""


def problems_between_fields(recipe: Recipe) -> Iterator[Problem]:
    """Yield every broken rule that is about several fields, with their values in the reason."""
    for path, section in _sections(recipe):
        yield from misplaced_keys(section, path, recipe)
        yield from (problem.inside(path) for problem in section.problems())
    yield from _cluster_problems(recipe)
    yield from _model_problems(recipe)
    yield from _agent_problems(recipe)
    yield from _evaluation_problems(recipe)
    yield from _bucket_problems(recipe)
    yield from _overlong_problems(recipe)
    yield from _curriculum_problems(recipe)
    yield from _advantage_problems(recipe.training)
    yield from _critic_problems(recipe)
    yield from _replay_problems(recipe)
    yield from _balance_problems(recipe.training)
    yield from _update_problems(recipe.training)
    yield from _elastic_problems(recipe)
    yield from _worker_problems(recipe)
    yield from _imitation_problems(recipe)
    yield from _teacher_problems(recipe)


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


def _imitation_problems(recipe: Recipe) -> Iterator[Problem]:
    """Demonstrations without their loss, and keys that mean nothing beside them."""
    loss, imitates = recipe.training.loss, bool(recipe.demonstrations)
    if imitates != recipe.training.needs.demonstrations:
        given = "is given" if imitates else "names no file"
        yield Problem(
            ("training.loss", "demonstrations"),
            f"is {loss!r}, and demonstrations {given}: loss sft learns from demonstrations, all "
            "others from what the policy plays",
        )
    if not imitates:
        return
    for key in _PLAYED:
        if getattr(recipe, key) != type(recipe).model_fields[key].default:
            yield Problem(
                (key, "demonstrations"),
                "means nothing in a run on demonstrations, which plays nothing: leave it out",
            )
    training = recipe.training
    for key in _PLAYED_IN_TRAINING:
        if getattr(training, key) != type(training).model_fields[key].default:
            yield Problem(
                (f"training.{key}", "demonstrations"),
                "means nothing to loss sft, the cross-entropy of demonstrations: leave it out",
            )


def _teacher_problems(recipe: Recipe) -> Iterator[Problem]:
    """A teacher without its loss, and what tokens that it has judged cannot go with."""
    teacher, training, rollout = recipe.teacher, recipe.training, recipe.rollout
    if (teacher is not None) != training.needs.teacher and not recipe.demonstrations:
        given = "is given" if teacher is not None else "is missing"
        yield Problem(
            ("training.loss", "teacher"),
            f"is {training.loss!r}, and teacher {given}: loss distill learns from the model at "
            "teacher: {url: http://HOST:8000/v1}, no other loss does",
        )
    if teacher is None:
        return
    if SECRET_IN_URL.search(teacher.url):
        yield Problem(
            ("teacher.url",),
            "has a secret in it, and this is no place for one; teacher.api_key is, as "
            "${TEACHER_API_KEY}",
        )
    if rollout.temperature != 1.0:
        yield Problem(
            ("rollout.temperature", "teacher"),
            f"is {rollout.temperature:g}, and the teacher's log-probabilities are at temperature "
            "1: the two could not be compared; leave it out, which is 1",
        )
    if rollout.dynamic_sampling:
        yield Problem(
            ("rollout.dynamic_sampling", "teacher"),
            "leaves out groups in which all rewards are the same, and a teacher teaches by them as "
            "by others: leave it out",
        )


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
        elif recipe.agent is not None and (one.tasks or one.environment is not None):
            yield Problem(
                (f"{key}.{'tasks' if one.tasks else 'environment'}", "agent"),
                "is another than the agent's: an agent is evaluated on its own environment only",
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


def _worker_problems(recipe: Recipe) -> Iterator[Problem]:
    known = [node.name for node in recipe.nodes]
    named = [(f"environment[{index}]", one) for index, one in enumerate(recipe.environment)]
    named += [
        (f"evaluation[{index}].environment", one.environment)
        for index, one in enumerate(recipe.evaluation)
        if one.environment is not None
    ]
    for key, environment in named:
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
            f"{model.max_len}",
        )


def _agent_problems(recipe: Recipe) -> Iterator[Problem]:
    agent = recipe.agent
    if agent is None:
        return
    known = [node.name for node in recipe.nodes]
    for name in agent.nodes:
        if name not in known:
            yield _unknown_node("agent.nodes", name, known)


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


def _advantage_problems(training: TrainingSpec) -> Iterator[Problem]:
    """Scales that an estimator does not have, and what cannot be known before a batch is whole."""
    scale = training.scale_rewards
    whole = training.needs.whole_batch and (not training.needs.critic or scale != "none")
    if whole and scale not in (None, "batch"):
        yield Problem(
            ("training.scale_rewards", "training.advantage"),
            f"is {scale}, but {training.advantage} normalises over the batch: leave it out",
        )
    if training.gamma != 1.0 and training.advantage in _UNDISCOUNTED:
        yield Problem(
            ("training.gamma", "training.advantage"),
            f"is {training.gamma:g}, but advantage: {training.advantage} weighs a trajectory as a "
            f"whole: leave it out, or name one of {', '.join(advantages_with(turns=True))}",
        )
    if training.stream and (whole or scale == "batch"):
        key = "advantage" if whole else "scale_rewards"
        yield Problem(
            ("training.stream", f"training.{key}"),
            f"is true, but training.{key}: {getattr(training, key)} needs the whole batch before "
            "the step begins: leave one of the two out",
        )


def _critic_problems(recipe: Recipe) -> Iterator[Problem]:
    """A critic's settings without one, and what none can go with."""
    training, rollout = recipe.training, recipe.rollout
    if recipe.demonstrations:
        return
    if training.needs.critic:
        yield from _beside_critic(recipe)
        return
    for key in ("lam", "critic"):
        if getattr(training, key) != type(training).model_fields[key].default:
            yield Problem(
                (f"training.{key}", "training.advantage"),
                f"is for advantage: gae, which has a critic, and {training.advantage} has none: "
                "leave it out",
            )
    if rollout.group_size == 1:
        yield Problem(
            ("rollout.group_size", "training.advantage"),
            f"is 1, and advantage: {training.advantage} would have nobody to compare a trajectory "
            "with: give 2 or more, or set training.advantage: gae, whose critic needs no group",
        )


_GROUP_LOSSES = {
    "tba": "compares the trajectories of a group, and values are of each by itself",
    "distill": "has the advantages of its teacher for every token",
}
"""Why advantages of a critic mean nothing to a loss."""


def _beside_critic(recipe: Recipe) -> Iterator[Problem]:
    training = recipe.training
    if reason := _GROUP_LOSSES.get(training.loss):
        yield Problem(
            ("training.advantage", "training.loss"),
            f"is gae, but the loss {training.loss} {reason}: leave it out, or take another loss",
        )
    if training.kl_in_reward:
        yield Problem(
            ("training.kl_in_reward", "training.advantage"),
            "takes the KL of a trajectory less the mean of its group from the reward, and "
            "advantage: gae has no group: leave it out, and kl_coef adds the KL to the loss",
        )
    if recipe.rollout.dynamic_sampling:
        yield Problem(
            ("rollout.dynamic_sampling", "training.advantage"),
            "leaves out groups in which all rewards are the same, and with advantage: gae they "
            "teach as others do: leave it out",
        )


def _balance_problems(training: TrainingSpec) -> Iterator[Problem]:
    if training.loss == "tba" and training.kl_coef > 0:
        yield Problem(
            ("training.kl_coef", "training.loss"),
            f"is {training.kl_coef}, but the loss tba has a KL term of its own: leave it out and "
            "set loss_args: {beta: ...}",
        )


def _replay_problems(recipe: Recipe) -> Iterator[Problem]:
    replay, training = recipe.replay, recipe.training
    if replay is None:
        return
    if replay.groups > replay.capacity:
        yield Problem(
            ("replay.groups", "replay.capacity"),
            f"is {replay.groups}, but only replay.capacity = {replay.capacity} are kept",
        )
    if training.staleness.masks:
        yield Problem(
            ("replay", "training.staleness"),
            "cannot go with the staleness rule token, which leaves old tokens out of the loss: "
            "write staleness: {rule: token, over: weight}, or another rule",
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
    yield from _term_problems(training)


def _term_problems(training: TrainingSpec) -> Iterator[Problem]:
    """Terms that the loss does not have, and an optimizer that the model is not laid out for."""
    if training.optimizer == "muon" and (training.sharding != "ddp" or training.lora is not None):
        wrong = "lora" if training.lora is not None else "sharding"
        yield Problem(
            ("training.optimizer", f"training.{wrong}"),
            "is muon, which moves whole matrices of the model: "
            + ("leave out training.lora" if training.lora else "set training.sharding: ddp"),
        )
    for key in ("entropy_coef", "kl_in_reward"):
        if training.loss in ("tba", "sft") and getattr(training, key):
            yield Problem(
                (f"training.{key}", "training.loss"),
                f"is {getattr(training, key)}, but the loss {training.loss} has no such term: "
                "leave it out",
            )
    if training.kl_in_reward and not training.kl_coef:
        yield Problem(
            ("training.kl_in_reward", "training.kl_coef"),
            "is true, but training.kl_coef is 0: give it the weight of the KL, as 0.001",
        )


def _elastic_problems(recipe: Recipe) -> Iterator[Problem]:
    """Slots that would be borrowed for shares of a step, of a step that has none."""
    training = recipe.training
    if training.shares_steps:
        return
    keys = ["training.minibatches", "training.epochs"]
    why = f"with {training.updates} updates"
    if training.updates == 1:
        keys, why = ["training.advantage"], "that a critic in the trainer weighs as a whole (gae)"
    for index, node in enumerate(recipe.nodes):
        if "hybrid" in (node.pool or ()):
            yield Problem(
                (f"nodes[{index}].pool", *keys),
                f"is hybrid, but gradient workers cannot help a batch {why}: make it auto (its "
                "side is then chosen once), train or rollout",
            )
