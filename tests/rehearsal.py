"""Plays turns, loads, aborts and want of memory to libra's engine as it is on GPUs.

    python -m tests.rehearsal MODEL_DIR

vLLM keeps two steps in flight on GPUs and never on CPUs. Here its workers are stubs, so that it can
be had of a CPU (``tests.stub_worker``). A line of JSON tells of each case: either runner, with
one rank and with two, and ``rollout.engine: safe``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from array import array
from collections import Counter
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.launch.process import HostFacts, ProcessSpec
from libra_cli.core.launch.rollout_backend import server_process
from libra_cli.node.rollout.turn import Answer

TURNS, ALIVE = 200, 40
ABORT, LOAD = 0.08, 0.06
"""Chances of them before a step."""
DEADLINE_S = 90.0
STUBS = (
    *("--worker-cls", "tests.stub_worker.StubWorker", "--skip-tokenizer-init"),
    *("--max-num-batched-tokens", "256", "--block-size", "16"),
)


class Case(NamedTuple):
    """``rollout.engine``, whether vLLM's second runner is played, and tensor-parallel ranks."""

    engine: str
    second: bool
    ranks: int


CASES = [Case("fast", second, ranks) for second in (False, True) for ranks in (1, 2)]
CASES.append(Case("safe", False, 1))


class Rehearsal:
    """One engine, and what was asked of it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.alive: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._random = random.Random(1)
        self._loaded = 0
        call = engine._core.collective_rpc

        def watched(method: str, *arguments: Any, **named: Any) -> Any:
            if method == "load_version":
                self._see_nothing_in_flight()
            return call(method, *arguments, **named)

        engine._core.collective_rpc = watched

    def play(self) -> dict[str, Any]:
        """Play all turns; return the counts and the faults."""
        until = time.monotonic() + DEADLINE_S
        self._load()
        while self.counts["turns"] < TURNS or self.alive:
            if time.monotonic() > until:
                self.faults.append(f"these did not end: {sorted(self.alive)}")
                break
            while self.counts["turns"] < TURNS and len(self.alive) < ALIVE:
                self._begin()
            if self._random.random() < ABORT:
                self._abort(self._random.choice(sorted(self.alive)))
            if self._random.random() < LOAD:
                self._load()
            self._end(self.engine.step())
        for told in self.engine._core.collective_rpc("told"):
            self.faults += told
        return {**self.counts, **self.engine.counters(), "faults": self.faults}

    def _begin(self) -> None:
        name, draw = f"turn {self.counts['turns']}", self._random.randint
        length = draw(2, 150)
        stop = [length + draw(0, 150)] if draw(0, 2) == 0 else []
        # Turns of one prompt share their prefix, as those of a group do.
        prompt = array("i", [self.counts["turns"] // 4, *range(1, length)])
        order = {
            "prompt_ids": prompt.tobytes(),
            "images": [],
            "max_tokens": draw(1, 150),
            "temperature": 1.0,
            "top_p": 1.0,
            "stop_token_ids": stop,
            "to_the_end": False,
            "score_prompt": False,
            "routes_from": 0,
            "cache_salt": str(self._loaded),
            "priority": draw(0, 3),
        }
        self.engine.add(name, order)
        self.alive[name] = order
        self.counts["turns"] += 1

    def _abort(self, name: str) -> None:
        answer = self.engine.abort(name)
        if answer is None:
            self.faults.append(f"{name} is not known any more")
        else:
            self._check(name, answer)
        self.counts["aborts"] += 1

    def _load(self) -> None:
        self._loaded += 1
        answer = self.engine.load(
            f"/versions/{self._loaded}",
            f"e1v{self._loaded}",
            partly=False,
            clear_cache=True,
            tell=self._end,
        )
        self.faults += answer["different"]
        self.counts["loads"] += 1

    def _see_nothing_in_flight(self) -> None:
        requests = self.engine._scheduler.requests.values()
        flying = sum(request.num_in_flight_tokens for request in requests)
        if self.engine._core.batch_queue or flying:
            self.faults.append(f"load {self._loaded} with {flying} tokens in flight")
        if lost := self.alive.keys() - self.engine._turns.keys():
            self.faults.append(f"load {self._loaded} began before {sorted(lost)} were answered")

    def _end(self, ended: list[tuple[str, Answer]]) -> None:
        for name, answer in ended:
            self._check(name, answer)

    def _check(self, name: str, answer: Answer) -> None:
        order = self.alive.pop(name)
        start = len(array("i", order["prompt_ids"]))
        tokens = array("i", answer["token_ids"]).tolist()
        last = min([start + order["max_tokens"] - 1, *order["stop_token_ids"]])
        whole = list(range(start, last + 1))
        reason = answer["finish_reason"]
        if tokens != (whole[: len(tokens)] if reason == "abort" else whole):
            self.faults.append(f"{name} has {tokens} for {start} to {last}, {reason}")
        expected = "stop" if last in order["stop_token_ids"] else "length"
        if reason not in (expected, "abort"):
            self.faults.append(f"{name} ended by {reason}, not {expected}")
        labels = [label for label, first, end in answer["spans"] for _ in range(end - first)]
        versions = [f"e1v{-value:.0f}" for value in array("f", answer["logprobs"])]
        if labels != versions or len(labels) != len(tokens):
            self.faults.append(f"{name} is labelled {labels}, and is of {versions}")
        self.counts["tokens"] += len(tokens)
        self.counts["changed"] += len(answer["spans"]) > 1


def server_of(model_dir: str, ranks: int, engine: str) -> ProcessSpec:
    """How libra starts such a server on a host without GPUs; vLLM's workers are stubs."""
    recipe = Recipe.model_validate(
        {
            "nodes": [{"host": "local", "slots": 2, "pool": ["rollout", "train"]}],
            "model": {"path": model_dir, "max_len": 512},
            "environment": {"name": "pointer-chase"},
            "rollout": {"engine": engine, "max_turn_tokens": 256, "vllm_args": STUBS},
        }
    )
    facts = HostFacts(
        node="local",
        python=sys.executable,
        workdir=model_dir,
        run_dir=f"{model_dir}/run",
        weights_dir=model_dir,
        address="127.0.0.1",
    )
    bucket = replace(initial_plan(recipe).servers[0][1], tensor_parallel=ranks)
    return server_process(recipe, slots_of(recipe)[0], bucket, facts, model_dir=model_dir)


def engine_of(case: Case, model_dir: str) -> Any:
    """The engine of such a server, which for ``fast`` schedules ahead as it would on a GPU."""
    from vllm.engine.arg_utils import EngineArgs

    from libra_cli.node.rollout.engine import VllmEngine

    server = server_of(model_dir, case.ranks, case.engine)
    os.environ |= {name: value for name, value in server.env.items() if name[:5] == "VLLM_"}
    create = EngineArgs.create_engine_config

    def as_on_gpus(told: EngineArgs, *arguments: Any, **named: Any) -> Any:
        config = create(told, *arguments, **named)
        config.scheduler_config.async_scheduling = True
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(case.second))  # needs Triton until here
        return config

    if case.engine == "fast":
        EngineArgs.create_engine_config = as_on_gpus
    return VllmEngine(server.argv[server.argv.index("--socket") + 2 :])


def rehearse(case: Case, model_dir: str) -> dict[str, Any]:
    """Play one case, and say what the engine was."""
    engine = engine_of(case, model_dir)
    try:
        played = Rehearsal(engine).play()
        return {"case": case, "engine": engine.about, "kv_tokens": engine.kv_tokens, **played}
    finally:
        engine.close()


def main() -> int:
    """Fork a process for each case, since vLLM reads its environment once."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    model_dir = sys.argv[1]
    for module in ("libra_cli.node.rollout.engine", "tests.stub_worker"):
        import_module(module)  # for all cases
    vllm = import_module("vllm.engine.arg_utils")
    vllm.EngineArgs(model=model_dir, skip_tokenizer_init=True).create_model_config()
    children = []
    for case in CASES:
        child = os.fork()
        if child == 0:
            told = json.dumps(rehearse(case, model_dir))
            os.write(sys.stdout.fileno(), f"{told}\n".encode())
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
