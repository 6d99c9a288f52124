"""Rules for the model: it is there, equal everywhere, and of a shape that servers can hold; and for
the model that teaches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libra_cli.core.costs.mixtures import experts_of, refused_routes
from libra_cli.core.costs.tensor_parallel import allowed_degrees, refused_degree
from libra_cli.core.frozen.slots import frozen_slots
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.families import refused_family
from libra_cli.core.preflight.findings import ALL, CONTROLLER, Finding, Remedy
from libra_cli.core.preflight.host_report import ModelFiles, NodeFacts

COUNTED = (".safetensors", ".bin", ".json", ".jinja", ".txt", ".model")
"""Endings of files that a model is made of; a README is not."""
INNER = ("gate_proj", "up_proj", "down_proj")
"""Matrices of a feed-forward layer, which a mixture has for each expert."""
NAMED = 3
"""Differing files that a finding names; further ones are counted."""

TRAINED = "model.path: a model of a family that libra help models lists"
SHARED_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers whose tokens ranks can share, as in ``node.model.packed_attention``."""


def model(case: PreflightCase) -> Iterator[Finding]:
    """The model is on every host, and the same."""
    path = case.recipe.model.path
    if path is None:
        build = case.recipe.model.build
        package = build.package if build is not None else None
        told = "libra builds it" if package is None else f"made of {package}, which is fetched once"
        yield Finding("model", ALL, "fine", told)
        return
    for node, facts in case.looked():
        if path not in facts.paths and node in case.recipe.planned_nodes:
            yield _missing(case, node.name, path)
    yield from _different(case, path)
    reference = case.model
    if reference is not None:
        count, size = len(reference.files), reference.weight_bytes / 1e9
        yield Finding("model", ALL, "fine", f"{count} files, {size:.2f} GB of weights, equal")


def frozen_models(case: PreflightCase) -> Iterator[Finding]:
    """The directories of frozen models are on the hosts that serve them, or may."""
    slots = frozen_slots(case.recipe.models, case.recipe.nodes)
    facts = {node.name: facts for node, facts in case.looked()}
    for host, name, path in sorted({(s.node.name, s.model.name, s.model.path) for s in slots}):
        if host in facts and path not in facts[host].paths:
            yield Finding(
                "frozen models",
                host,
                "stops",
                f"there is no {path}",
                f"the server of model {name} loads it from the host's own disk",
                Remedy("host", f"hf download OWNER/NAME --local-dir {path}"),
            )
    yield from _hosts_that_may_serve(case, facts)
    fine = f"{len(slots)} servers find their models" if slots else "the run serves no others"
    yield Finding("frozen models", ALL, "fine", fine)


def _hosts_that_may_serve(case: PreflightCase, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield hosts whose slots a model may be given, and that do not have it."""
    more = [one for one in case.recipe.models if one.most_slots > one.slots]
    free = [node.name for node in case.recipe.nodes if {"auto", "hybrid"} & {*node.slot_pools}]
    for model in more:
        for host in free:
            if host in facts and model.path not in facts[host].paths:
                yield Finding(
                    "frozen models",
                    host,
                    "warns",
                    f"there is no {model.path}",
                    f"a slot that model {model.name} is given there is given back",
                    Remedy("host", f"hf download OWNER/NAME --local-dir {model.path}"),
                )


def _missing(case: PreflightCase, host: str, path: str) -> Finding:
    return Finding(
        "model",
        host,
        "stops",
        f"there is no {path}",
        "servers and ranks load it from their own disk",
        Remedy("here", f"libra setup {case.recipe_path}", fix="model"),
    )


def _different(case: PreflightCase, path: str) -> Iterator[Finding]:
    reference = case.model
    if reference is None:
        return
    first = next(name for name, report in _in_order(case) if report is reference)
    for host, found in _in_order(case):
        if found is not None and (files := differing_files(reference, found)):
            named = ", ".join(files[:NAMED])
            more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
            yield Finding(
                "model",
                host,
                "stops",
                f"{path} is not what {first} has: {named}{more}",
                "its servers would play another policy than the one that is trained",
                Remedy("here", f"libra setup {case.recipe_path}", fix="model"),
            )


def _in_order(case: PreflightCase) -> list[tuple[str, ModelFiles | None]]:
    names = [case.head, *(name for name in case.hosts if name != case.head)]
    return [(name, case.hosts[name].model) for name in names if name in case.hosts]


def differing_files(reference: ModelFiles, other: ModelFiles) -> list[str]:
    """Names of files that only one has, or that differ."""
    names = sorted({*reference.files, *other.files})
    counted = (name for name in names if name.endswith(COUNTED))
    return [name for name in counted if reference.files.get(name) != other.files.get(name)]


def family(case: PreflightCase) -> Iterator[Finding]:
    """The model is of a family that can be trained, published and proved."""
    if case.model is None or not case.model.config:
        return
    refused = refused_family(case.model.config, images=case.recipe.model.images)
    if refused is None:
        kind = case.model.config.get("model_type", "?")
        yield Finding("family", ALL, "fine", f"{kind} is none of those that are refused")
        return
    yield Finding(
        "family",
        ALL,
        "stops",
        f"{case.recipe.model.path} cannot be trained: {refused.why}",
        "the run would end in the trainer, or at the first version that a server loads",
        Remedy("recipe", refused.instead),
    )


def names(case: PreflightCase) -> Iterator[Finding]:
    """The tensors of the files are those of transformers' model, by name and shape."""
    if case.recipe.model.path is None or case.model is None:
        where = "before libra has built it" if case.recipe.model.path is None else "without files"
        yield Finding("names", ALL, "fine", f"not tried {where}: the trainer does it first")
        return
    report, path = case.names, case.recipe.model.path
    if report is None or refused_family(case.model.config, images=case.recipe.model.images):
        return
    if report.untried:
        yield Finding(
            "names",
            case.head,
            "warns",
            f"the names of {path} could not be tried: {report.untried}",
            "the trainer maps them first, and might end there",
            Remedy("host", f"python -m libra_cli.node.checks.model_names {path}"),
        )
    elif report.error:
        yield Finding(
            "names",
            case.head,
            "stops",
            f"{path} cannot be trained: {report.error}",
            "the trainer would end with it",
            Remedy("recipe", report.hint or TRAINED),
        )
    else:
        beside = f", {report.unused} are of other parts" if report.unused else ""
        told = f"{report.tensors} tensors of the files are those of {report.model}{beside}"
        yield Finding("names", ALL, "fine", told)


def shape(case: PreflightCase) -> Iterator[Finding]:
    """Check that heads divide among the GPUs of a server, and that
    contexts are no longer than the model's.
    """
    if case.model is None or not case.model.config:
        return
    config = case.model.config.get("text_config", case.model.config)
    degrees = {bucket.tensor_parallel for _, bucket in case.plan.servers}
    degrees |= {bucket.tensor_parallel for bucket in case.recipe.rollout.buckets or ()}
    for degree in sorted(degrees):
        if reason := refused_degree(config, degree):
            allowed = allowed_degrees(config)
            yield Finding(
                "shape",
                ALL,
                "stops",
                f"tensor_parallel {degree} does not divide the model: {reason}",
                "vLLM refuses to start such a server",
                Remedy("recipe", f"rollout.buckets[].tensor_parallel: one of {_listed(allowed)}"),
            )
    yield from _shared_rows(case, config)
    yield from _dense_only(case, config)
    yield from _parted_experts(case, config)
    yield from _adapted_experts(case, config)
    if case.recipe.training.rollout_routes and (reason := refused_routes(config)):
        yield Finding(
            "shape",
            ALL,
            "stops",
            f"training.rollout_routes is not for this model: {reason}",
            "servers or the trainer would refuse to start",
            Remedy("recipe", "training: {rollout_routes: false}"),
        )
    longest, wanted = config.get("max_position_embeddings"), case.recipe.model.max_len
    if isinstance(longest, int) and wanted > longest and not _is_stretched(config):
        yield Finding(
            "shape",
            ALL,
            "stops",
            f"model.max_len is {wanted}, the model's positions end at {longest}",
            "vLLM refuses to start, and the trainer would compute nonsense beyond it",
            Remedy("recipe", f"model: {{max_len: {longest}}}"),
        )
    heads, groups = config.get("num_attention_heads", "?"), config.get("num_key_value_heads", "?")
    told = f"{heads} heads, {groups} of keys, among {_listed(sorted(degrees))} GPUs"
    yield Finding("shape", ALL, "fine", told)


def _dense_only(case: PreflightCase, config: Mapping[str, Any]) -> Iterator[Finding]:
    training = case.recipe.training
    for name, given in (("tiled_mlp", training.tiled_mlp), ("compile", training.compile)):
        if given and experts_of(config):
            yield Finding(
                "shape",
                ALL,
                "stops",
                f"training.{name} is for dense models, and this is a mixture of experts",
                "the trainer refuses to start",
                Remedy("recipe", f"training.{name}: false"),
            )


def _shared_rows(case: PreflightCase, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Ranks that share a forward pass have equally many heads, and layers that let them."""
    size, heads = case.recipe.training.cp_size or 1, config.get("num_attention_heads")
    others = sorted(set(config.get("layer_types") or ()) - SHARED_LAYERS)
    reason = f"it has layers of {others[0]}" if others else ""
    if not reason and isinstance(heads, int) and heads % size:
        reason = f"it has {heads} attention heads"
    if not reason and experts_of(config) and config.get("output_router_logits"):
        reason = "its routers are balanced over whole sequences (output_router_logits)"
    if size > 1 and reason:
        yield Finding(
            "shape",
            ALL,
            "stops",
            f"training.cp_size {size} does not divide the model: {reason}",
            "the trainer refuses to start",
            Remedy("recipe", "training.cp_size: 1, or a divisor of the model's attention heads"),
        )


def _parted_experts(case: PreflightCase, config: Mapping[str, Any]) -> Iterator[Finding]:
    size, experts = case.recipe.training.ep_size or 1, experts_of(config)
    if size > 1 and (not experts or experts % size):
        had = f"{experts} experts" if experts else "no experts"
        yield Finding(
            "shape",
            ALL,
            "stops",
            f"training.ep_size {size} does not divide the model: it has {had}",
            "the trainer refuses to start, or every rank gathers all experts",
            Remedy("recipe", "training.ep_size: 1, or a divisor of the number of experts"),
        )


def _adapted_experts(case: PreflightCase, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Experts have an adapter where the recipe says so, and routers never."""
    lora, experts = case.recipe.training.lora, experts_of(config)
    if lora is None or bool(experts) == lora.experts:
        return
    if lora.experts:
        yield Finding(
            "shape",
            ALL,
            "stops",
            "training.lora.experts is true, and the model has no experts",
            "the trainer refuses to start",
            Remedy("recipe", "training: {lora: {experts: false}}"),
        )
        return
    named = [one for one in lora.target_modules if one in INNER]
    if named and not _has_dense_parts(config):
        yield Finding(
            "shape",
            ALL,
            "stops",
            f"training.lora names {', '.join(named)}, of which the model has {experts} experts "
            "and nothing else",
            "target_modules are matrices, experts have a switch of their own",
            Remedy("recipe", "training: {lora: {target_modules: all-linear, experts: true}}"),
        )
    elif "all-linear" in lora.target_modules or named:
        yield Finding(
            "shape",
            ALL,
            "warns",
            f"the adapter is not on the model's {experts} experts",
            "attention and what every token meets are trained, experts and routers stay",
            Remedy("recipe", "training: {lora: {experts: true}}"),
        )


def _has_dense_parts(config: Mapping[str, Any]) -> bool:
    keys = ("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace")
    return any(config.get(key) for key in (*keys, "mlp_only_layers"))


def _listed(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))


def _is_stretched(config: Mapping[str, Any]) -> bool:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return "factor" in scaling


def template(case: PreflightCase) -> Iterator[Finding]:
    """Check that turns can be appended to the chat template, token by token."""
    if case.template is None:
        return
    report = case.template
    if report.error:
        yield Finding(
            "template",
            ALL,
            "stops",
            report.error,
            "tokens that servers generate could not be trained on as they are",
            Remedy("host", report.hint) if report.hint else None,
        )
        return
    for misfit in report.misfits:
        remedy = Remedy("recipe", "model: {tool_format: NAME}  # libra help models")
        yield Finding("template", ALL, "warns", f"the chat template {misfit}", remedy=remedy)
    told = f"turns can be appended to it exactly, tool calls are read as {report.tool_format}"
    yield Finding("template", ALL, "fine", "; it ".join((told, *report.notes)))


def teacher(case: PreflightCase) -> Iterator[Finding]:
    """Check that the teacher answers the controller, and knows the policy's tokens."""
    report = case.teacher
    if report is None:
        return
    if report.error:
        yield Finding(
            "teacher",
            CONTROLLER,
            "stops",
            report.error,
            "no trajectory could be trained on without its log-probabilities",
            Remedy("recipe", report.hint) if report.hint else None,
        )
        return
    compared = "has the policy's vocabulary" if report.compared else "its vocabulary is compared"
    when = "" if report.compared else " when a run begins"
    yield Finding("teacher", CONTROLLER, "fine", f"{report.model} answers, {compared}{when}")
