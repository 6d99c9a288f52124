"""Whether servers can draft as the recipe wants: by the head's config.json and the policy's.

What vLLM 0.32 runs was found with tiny random models on CPUs: EAGLE and EAGLE-3 heads, and the MTP
layer of GLM 4.5. Qwen3-Next's and Qwen3.5's MTP layers are loaded there and proved, and then a
kernel is missing that has a CPU form for none of the models with linear attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from libra_cli.config.speculative import SpeculativeSpec
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.findings import ALL, Finding, Remedy
from libra_cli.core.preflight.model_checks import differing_files

CHECK = "drafts"
MTP_FAMILIES = ("glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families, by ``model_type``, whose MTP layers servers can name in the files and prove."""
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of a config.json that say how many MTP layers there are."""


def refused_drafts(
    speculative: SpeculativeSpec,
    policy: Mapping[str, Any],
    head: Mapping[str, Any],
    *,
    on_cpus: bool,
) -> str:
    """Return why servers cannot draft so; empty if they can, or if it cannot be told.

    ``policy`` and ``head`` are what the two config.json say, empty where they are not known.
    """
    inner = policy.get("text_config") or policy
    if on_cpus and "linear_attention" in (inner.get("layer_types") or ()):
        return (
            "vLLM has no CPU kernel that keeps the state of linear attention beside drafts "
            "(precopy_mamba_align_fused_kernel)"
        )
    if speculative.method == "mtp":
        return _refused_layers(inner) if inner else ""
    if speculative.has_own_directory and head and inner:
        return _refused_head(speculative.method, inner, head)
    return ""


def _refused_layers(inner: Mapping[str, Any]) -> str:
    kind = inner.get("model_type", "?")
    if kind not in MTP_FAMILIES:
        return (
            f"the MTP layers of {kind} were not tried; those of {', '.join(MTP_FAMILIES)} can be "
            "named and proved"
        )
    if any(inner.get(key) == 0 for key in _COUNTS):
        return "its config.json says that it has no MTP layers"
    return ""


def _refused_head(method: str, inner: Mapping[str, Any], head: Mapping[str, Any]) -> str:
    """Return why a head is not one for the policy, or not of the method."""
    kind = "eagle3" if _is_third(head) else "eagle"
    if kind != method:
        return f"its config.json is of a head for method: {kind}"
    sizes = {
        "hidden_size": (head.get("target_hidden_size") or head.get("hidden_size"), "hidden_size"),
        "vocab_size": (head.get("vocab_size"), "vocab_size"),
    }
    for name, (found, key) in sizes.items():
        if found != inner.get(key):
            return f"it is for a model of {name} {found}, and this one's is {inner.get(key)}"
    return _refused_places(inner, head) if method == "eagle3" else ""


def _is_third(head: Mapping[str, Any]) -> bool:
    named = any("eagle3" in str(one).lower() for one in head.get("architectures") or ())
    return named or "draft_vocab_size" in head


def _refused_places(inner: Mapping[str, Any], head: Mapping[str, Any]) -> str:
    """Return why the layers whose hidden states an EAGLE-3 head is given are none; else empty."""
    layers, key = int(inner["num_hidden_layers"]), "eagle_aux_hidden_state_layer_ids"
    given = head.get(key) or (head.get("eagle_config") or {}).get(key)
    places = given or (2, layers // 2, layers - 3)
    if len({*places}) < len(places) or not all(0 <= place <= layers for place in places):
        told = f"{key} {list(places)}" + ("" if given else ", which vLLM takes by itself,")
        return f"it needs hidden states of {len(places)} layers, and {told} do not name as many"
    return ""


def drafts(case: PreflightCase) -> Iterator[Finding]:
    """Check that servers can draft as the recipe wants, and that the head is there and equal."""
    speculative = case.recipe.rollout.speculative
    if speculative is None:
        return
    yield from _head_files(case, speculative)
    policy = case.model.config if case.model is not None else {}
    head = case.head_files.config if case.head_files is not None else {}
    on_cpus = any(not node.gpus for node, _ in case.of_half("rollout"))
    if reason := refused_drafts(speculative, policy, head, on_cpus=on_cpus):
        yield _stops(ALL, f"rollout.speculative.method: {speculative.method}: {reason}")
    names = case.names
    if speculative.method == "mtp" and names and not names.untried and not names.unused:
        yield _stops(ALL, "the model's files have no tensors besides the model: no MTP layers")
    yield Finding(CHECK, ALL, "fine", f"drafts by {speculative.method}")


def _head_files(case: PreflightCase, speculative: SpeculativeSpec) -> Iterator[Finding]:
    """The head is on every host that serves, in a format that can be proved, and the same."""
    path, reference = speculative.model, case.head_files
    if path is None:
        return
    for node, _ in case.of_half("rollout"):
        found = case.hosts[node.name].head
        if found is None or not found.config:
            yield _stops(node.name, f"there is no {path} with a config.json", _copy(path))
        elif not any(name.endswith(".safetensors") for name in found.files):
            yield _stops(node.name, f"{path} has no safetensors files, which a server can prove")
        elif reference is not None and (files := differing_files(reference, found)):
            yield _stops(node.name, f"{path} is not what others have: {files[0]}", _copy(path))


def _copy(path: str) -> Remedy:
    return Remedy("host", f"rsync -a HOST:{path}/ {path}/")


def _stops(where: str, what: str, remedy: Remedy | None = None) -> Finding:
    return Finding(
        CHECK,
        where,
        "stops",
        what,
        "servers would end before their first turn",
        remedy or Remedy("recipe", "rollout: {speculative: null}, or {method: ngram}"),
    )
