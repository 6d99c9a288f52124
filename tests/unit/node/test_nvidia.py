"""GPUs as nvidia-smi lists them, and which of them a run may use. No GPU made these listings: they
have the elements that ``nvidia-smi -q -x`` documents."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from libra_cli.node.agent.host_facts import nvidia
from libra_cli.node.agent.host_facts.nvidia import ListedGpu, choose, describe, read

MIB = 1024**2
INSTANCE = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"


def gpu(number: int, *, free: str = "81079 MiB", mig: str = "Disabled", inside: str = "") -> str:
    return f"""<gpu id="00000000:0{number}:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <uuid>GPU-5f0c2a5e-0a1c-7f9b-3a57-00000000000{number}</uuid>
  <mig_mode><current_mig>{mig}</current_mig><pending_mig>{mig}</pending_mig></mig_mode>
  <fb_memory_usage><total>81559 MiB</total><used>480 MiB</used><free>{free}</free></fb_memory_usage>
  {inside}</gpu>"""


def process(pid: str, kind: str = "C", instance: str = "N/A") -> str:
    return (
        f"<process_info><gpu_instance_id>{instance}</gpu_instance_id><pid>{pid}</pid>"
        f"<type>{kind}</type><used_memory>[N/A]</used_memory></process_info>"
    )


def log(*gpus: str) -> str:
    inside = "".join(gpus)
    head = '<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">'
    return (
        f"{head}<nvidia_smi_log><driver_version>580.65.06</driver_version>"
        f"<attached_gpus>{len(gpus)}</attached_gpus>{inside}</nvidia_smi_log>"
    )


SPLIT = gpu(
    1,
    mig="Enabled",
    inside="".join(
        f"<mig_devices><mig_device><index>{i}</index><gpu_instance_id>{i + 1}</gpu_instance_id>"
        f"<fb_memory_usage><total>{size} MiB</total><free>{size} MiB</free></fb_memory_usage>"
        "</mig_device></mig_devices>"
        for i, size in enumerate((40192, 20096))
    )
    + f"<processes>{process('4194305', instance='2')}</processes>",
)
LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5f0c2a5e-0a1c-7f9b-3a57-000000000000)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-5f0c2a5e-0a1c-7f9b-3a57-000000000001)
  MIG 3g.40gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)
  MIG 2g.20gb     Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that prints ``xml`` and ``list``, and tells in ``calls`` how it was called."""
    place = tmp_path / "nvidia-smi"
    place.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n'
        f"test -e {tmp_path}/slow && sleep 5\n"
        f'case "$1" in -L) cat {tmp_path}/list;; *) cat {tmp_path}/xml;; esac\n'
        f"test ! -e {tmp_path}/status || exit $(cat {tmp_path}/status)\n"
    )
    place.chmod(place.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "list").write_text(LISTED)
    return tmp_path


def test_one_call_tells_sizes_holders_and_the_driver(nvidia_smi: Path):
    (nvidia_smi / "xml").write_text(
        log(gpu(0, inside=process(str(os.getpid())) + process("7", kind="G")), gpu(1, free="N/A"))
    )
    told: Any = describe([])
    first, second = told["gpus"]
    assert told["driver"] == "580.65.06"
    assert (first["mem_total"], first["mem_free"]) == (81559 * MIB, 81079 * MIB)
    (held,) = first["holders"]
    assert held["pid"] == os.getpid()
    assert held["user"]
    assert "pytest" in held["command"]
    assert (second["index"], second["device"], second["mem_free"]) == (1, "1", 0)
    assert (nvidia_smi / "calls").read_text() == "-q -x\n"


def test_a_pid_that_is_not_told_or_cannot_be_looked_up_is_still_a_holder():
    (only,) = read(log(gpu(0, inside=process("[N/A]") + process("4194305")))).gpus
    assert [one["pid"] for one in only.holders] == [0, 4194305]
    assert only.holders[1] == {"pid": 4194305, "user": "", "command": "", "run": ""}


def test_instances_of_a_gpu_have_their_own_sizes_and_stand_for_it(nvidia_smi: Path):
    (nvidia_smi / "xml").write_text(log(gpu(0), SPLIT))
    told: Any = describe([])
    whole, large, small = told["gpus"]
    assert whole["device"] == "0"
    assert (large["device"], large["mem_total"], large["holders"]) == (INSTANCE, 40192 * MIB, [])
    assert (small["mem_total"], len(small["holders"])) == (20096 * MIB, 1)
    chosen: Any = describe([INSTANCE, "1"])
    assert [one["device"] for one in chosen["gpus"]] == [INSTANCE]
    assert chosen["gpus_missing"] == ["1"], "a GPU that is split cannot be used whole"


def test_a_listing_that_does_not_come_in_time_is_told(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
):
    (nvidia_smi / "slow").touch()
    monkeypatch.setattr(nvidia, "NVIDIA_SMI_S", 0.2)
    told = describe([])
    assert told["gpus"] == []
    assert "did not answer within" in str(told["gpus_error"])


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed because it could not ..."])
def test_no_driver_means_no_gpus_and_says_so(nvidia_smi: Path, text: str):
    (nvidia_smi / "xml").write_text(text)
    told = describe([])
    assert told["gpus"] == []
    assert told["gpus_error"]


LOST = "Unable to determine the device handle for GPU0000:01:00.0: GPU is lost. Reboot"


def test_a_gpu_that_is_lost_is_told_in_its_own_words(nvidia_smi: Path):
    (nvidia_smi / "status").write_text("15")
    (nvidia_smi / "xml").write_text(f"\n{LOST}\n")
    assert describe([])["gpus_error"] == f"nvidia-smi fails: {LOST} (exit status 15)"
    (nvidia_smi / "xml").write_text(log(gpu(0)))
    told: Any = describe([])
    assert (len(told["gpus"]), told["gpus_error"]) == (1, ""), "the others are listed"


FOUR = [ListedGpu((str(i), f"GPU-{i}a-5f0c"), "H100", MIB, MIB) for i in range(4)]


@pytest.mark.parametrize(
    ("wanted", "visible", "devices", "missing"),
    [
        ([], None, "0123", ""),
        ([], "2,3", "23", ""),
        ([], "3,1", "31", ""),
        ([], "", "", ""),
        ([], "1,-1,2", "1", ""),
        ([], "GPU-2a,0", "20", ""),
        (["3", "2"], None, "32", ""),
        (["GPU-1a-5f0c"], None, "1", ""),
        (["1", "7"], None, "1", "7"),
        (["1", "2"], "2,3", "2", "1"),
    ],
)
def test_gpus_are_those_named_of_those_that_are_visible(
    wanted: list[str], visible: str | None, devices: str, missing: str
):
    chosen = choose(FOUR, wanted, visible)
    assert "".join(gpu.names[0] for gpu in chosen.gpus) == devices
    assert "".join(chosen.missing) == missing


def test_a_listing_tells_uuids_and_places_and_leaves_a_lost_gpu_out(nvidia_smi: Path):
    lost = gpu(1).replace("81559 MiB", "GPU is lost")
    (nvidia_smi / "xml").write_text(log(gpu(0), lost, gpu(2)))
    told: Any = describe([])
    assert [(one["device"], one["uuid"][-1], one["bus"]) for one in told["gpus"]] == [
        ("0", "0", "00000000:00:00.0"),
        ("2", "2", "00000000:02:00.0"),
    ]
    assert [uuid[-1] for uuid in told["gpus_present"]] == ["0", "2"]
    assert told["gpus_error"] == "nvidia-smi says that the GPU at 00000000:01:00.0 is lost"


def test_what_is_present_is_told_whatever_the_run_may_use(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
):
    (nvidia_smi / "xml").write_text(log(gpu(0), gpu(2), SPLIT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    told: Any = describe(["0"])
    assert (told["gpus"], told["gpus_missing"]) == ([], ["0"])
    assert [uuid[:5] for uuid in told["gpus_present"]] == ["GPU-5", "GPU-5", "MIG-c", "MIG-a"]


def test_instances_go_with_their_gpu():
    split = SPLIT.replace("81559 MiB", "[GPU requires reset]")
    assert [one.is_usable for one in read(log(gpu(0), split)).gpus] == [True, False, False, False]
