"""Rules for a host's Python: what is installed, what fits, and what loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libra_cli.config.recipe import NodeSpec
from libra_cli.core.preflight.case import PreflightCase, packages_needed
from libra_cli.core.preflight.findings import ALL, Finding, Remedy
from libra_cli.core.preflight.host_report import NodeFacts, TorchReport
from libra_cli.core.preflight.versions import (
    TESTED,
    driver_runs,
    is_tested,
    least_driver,
    unmet,
)

SHOWN = ("vllm", "torch", "transformers", "accelerate")
MUST_BE_EQUAL = ("torch", "accelerate", "transformers")
"""Packages whose versions must be equal on all hosts that train together."""


def install(case: PreflightCase, node: NodeSpec) -> Remedy:
    """Return the command that installs libra's packages on a node."""
    if node.is_local:
        return Remedy("here", f"{node.python or 'python3'} -m pip install '{node.requirement}'")
    return Remedy("here", f"libra setup {case.recipe_path}", fix="environment")


def reached(case: PreflightCase) -> Iterator[Finding]:
    """Check that every host answers, and that its Python runs the agent."""
    for node in case.recipe.nodes:
        report = case.hosts.get(node.name)
        if report is not None and report.error:
            yield Finding(
                "reach",
                node.name,
                "stops",
                report.error,
                "nothing can be started or looked at there",
                _remedy_of_error(case, node, report.hint),
            )
    told = [f"{facts.python}" for _, facts in case.everyone()]
    yield Finding("reach", ALL, "fine", f"{len(told)} answer, Python {_joined(told)}")


def _remedy_of_error(case: PreflightCase, node: NodeSpec, hint: str) -> Remedy | None:
    if "no Python that runs" in case.hosts[node.name].error:
        return install(case, node)
    return Remedy("host", hint) if hint else None


def packages(case: PreflightCase) -> Iterator[Finding]:
    """Check that the packages needed are installed, supported by libra, and fit each other."""
    needed = packages_needed(case.recipe)
    for node, facts in case.looked():
        wanted = {name for half in case.halves(node) for name in needed[half]}
        missing = sorted(wanted - set(facts.packages))
        if missing:
            yield Finding(
                "packages",
                node.name,
                "stops",
                f"its python has no {', '.join(missing)}",
                f"it cannot {' or '.join(dict.fromkeys(map(_deed, case.halves(node))))}",
                install(case, node),
            )
        yield from _untested(case, node, facts)
        yield from _unfit(case, node, facts)
    yield Finding("packages", ALL, "fine", _versions_told(case))


def _deed(half: str) -> str:
    return "train" if half == "train" else "serve"


def _untested(case: PreflightCase, node: NodeSpec, facts: NodeFacts) -> Iterator[Finding]:
    for package, version in facts.packages.items():
        if not is_tested(package, version):
            yield Finding(
                "packages",
                node.name,
                "warns",
                f"it has {package} {version}; libra is made for {TESTED[package]}",
                "routes and arguments change between versions",
                install(case, node),
            )


def _unfit(case: PreflightCase, node: NodeSpec, facts: NodeFacts) -> Iterator[Finding]:
    for package, wanted, there in unmet(facts.packages, facts.requires, facts.markers):
        yield Finding(
            "packages",
            node.name,
            "warns",
            f"{package} {facts.packages.get(package, '')} wants {wanted}, there is {there}",
            "they are built for each other: others may fail to load, or crash",
            install(case, node),
        )


def _versions_told(case: PreflightCase) -> str:
    seen = [facts for _, facts in case.looked()]
    told = []
    for package in SHOWN:
        versions = [facts.packages[package] for facts in seen if package in facts.packages]
        if versions:
            told.append(f"{package} {_joined(versions)}")
    return ", ".join(told) or "nothing to tell"


def _joined(values: Sequence[str]) -> str:
    """Return the distinct values in order, joined by "or"."""
    return " or ".join(dict.fromkeys(values))


def same_versions(case: PreflightCase) -> Iterator[Finding]:
    """Check that hosts that train together have the same versions, and so those that serve."""
    yield from _differing(case, "train", MUST_BE_EQUAL, "stops")
    yield from _differing(case, "rollout", ("vllm",), "warns")
    yield Finding("versions", ALL, "fine", "the same on all hosts that work together")


def _differing(
    case: PreflightCase, half: str, names: Sequence[str], severity: str
) -> Iterator[Finding]:
    group = case.of_half(half)
    if not group:
        return
    first, reference = group[0]
    for node, facts in group[1:]:
        for package in names:
            here, there = facts.packages.get(package), reference.packages.get(package)
            if here and there and here != there:
                yield Finding(
                    "versions",
                    node.name,
                    "stops" if severity == "stops" else "warns",
                    f"it has {package} {here}, {first.name} has {there}",
                    "ranks of one world must be of one build"
                    if half == "train"
                    else "their log-probabilities may differ",
                    install(case, node),
                )


def driver(case: PreflightCase) -> Iterator[Finding]:
    """The driver runs the CUDA that torch is built for."""
    with_gpus = [(node, facts) for node, facts in case.looked() if node.gpus]
    for node, facts in with_gpus:
        if "torch" in facts.packages and not facts.torch_cuda:
            yield Finding(
                "driver",
                node.name,
                "stops",
                f"its torch {facts.packages['torch']} is built without CUDA",
                f"it cannot use the {node.gpus} GPUs of the recipe",
                install(case, node),
            )
        elif not _measured(case, node) and not driver_runs(facts.driver, facts.torch_cuda):
            least = least_driver(facts.torch_cuda)
            yield Finding(
                "driver",
                node.name,
                "stops",
                f"driver {facts.driver} is older than CUDA {facts.torch_cuda} of its torch needs "
                f"({least} or newer)",
                "torch finds no GPU then",
                Remedy("here", "libra help gpus (three ways out of an old driver)"),
            )
    if with_gpus:
        drivers = _joined([facts.driver or "none" for _, facts in with_gpus])
        cuda = _joined([facts.torch_cuda or "none" for _, facts in with_gpus])
        yield Finding("driver", ALL, "fine", f"driver {drivers}, torch for CUDA {cuda}")
    else:
        yield Finding("driver", ALL, "fine", "the recipe uses no GPUs")


def _measured(case: PreflightCase, node: NodeSpec) -> bool:
    """Whether torch has computed on the node's GPUs, which says more than a table of drivers: a
    compatibility package makes an old driver do."""
    report = case.hosts[node.name].torch
    return report is not None and report.available and not report.error


def torch(case: PreflightCase) -> Iterator[Finding]:
    """Check that torch and the packages on it load in the Python of a run, and see the GPUs."""
    told = []
    for node, _ in case.looked():
        report = case.hosts[node.name].torch
        if report is not None:
            yield from _torch_of(case, node, report)
            yield from _triton_of(case, node, report)
            told.append(f"torch {report.version}" + (" with CUDA" if report.available else ""))
    if told:
        yield Finding("torch", ALL, "fine", f"{_joined(told)} loads, and what needs it")


def _torch_of(case: PreflightCase, node: NodeSpec, report: TorchReport) -> Iterator[Finding]:
    broken = dict(report.errors) | ({"torch": report.error} if report.error else {})
    for package, error in broken.items():
        yield Finding(
            "torch",
            node.name,
            "stops",
            f"{package} does not load: {error}",
            "servers and ranks would end the same way, a minute later",
            _remedy_of_import(case, node, error),
        )
    if node.gpus and not report.error and len(report.devices) < node.gpus:
        yield Finding(
            "torch",
            node.name,
            "stops",
            f"torch sees {len(report.devices)} GPUs, the recipe uses {node.gpus}"
            + ("" if report.available else " (torch.cuda.is_available() is False)"),
            "ranks and servers would not start",
            Remedy("host", "nvidia-smi; echo $CUDA_VISIBLE_DEVICES"),
        )


def _triton_of(case: PreflightCase, node: NodeSpec, report: TorchReport) -> Iterator[Finding]:
    """Check that kernels can be compiled there, which vLLM does when it starts."""
    if not report.triton:
        return
    serves, compiles = "serve" in map(_deed, case.halves(node)), _compiles(case, node)
    yield Finding(
        "torch",
        node.name,
        "stops" if serves or compiles else "warns",
        f"Triton cannot compile a kernel: {report.triton}",
        "a server ends a minute after its start then"
        if serves or not compiles
        else "the trainer's first step needs one (training.compile)",
        Remedy("person", "as root: apt-get install gcc python3-dev (or libra help gpus)"),
    )


def _compiles(case: PreflightCase, node: NodeSpec) -> bool:
    """Whether ranks on this node compile their layers."""
    return case.recipe.training.compile and "train" in case.halves(node)


def compiler(case: PreflightCase) -> Iterator[Finding]:
    """Check that hosts without GPUs that train have what torch compiles layers with, if it does;
    on GPUs that is Triton, of which a kernel is tried. A node's own CXX is believed."""
    for node, facts in case.looked():
        if not node.gpus and facts.cpp_missing and "CXX" not in node.env and _compiles(case, node):
            yield Finding(
                "compiler",
                node.name,
                "stops",
                f"{facts.cpp_missing}, and training.compile is true",
                "the trainer's first step needs one",
                Remedy("person", "as root: apt-get install g++ python3-dev, or leave out compile"),
            )
    needed = case.recipe.training.compile
    yield Finding("compiler", ALL, "fine", "is there" if needed else "the trainer needs none")


def _remedy_of_import(case: PreflightCase, node: NodeSpec, error: str) -> Remedy:
    if "torchvision" in error:
        python = node.python or "~/.libra/venv/bin/python"
        what = "torchvision torchaudio torchcodec"
        return Remedy("host", f"uv pip uninstall --python {python} {what}", fix="environment")
    return install(case, node)
