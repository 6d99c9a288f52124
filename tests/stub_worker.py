"""A worker of vLLM that computes nothing, and sees whether it is asked for the right things.

What vLLM's executors, engine core and scheduler do with it is real. It answers late, as a GPU does,
in the form of either model runner. The token at position p of a context is p, and its
log-probability is minus the number of the version that was loaded: so a token that is lost, doubled
or of another version than its label is seen. Its KV cache holds of each position whose it is.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    LogprobsTensors,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from libra_cli.node.rollout.worker import VersionLoader

KV_BLOCKS, BLOCK = 160, 16
LATE_S = 0.001


@dataclass
class Row:
    """A request, as a model runner keeps it."""

    tokens: list[int]
    prompt: int
    blocks: list[int]
    end: int
    """Positions that were computed when its last step ends."""

    def slots(self, end: int) -> NDArray[np.int64]:
        """Places in the KV cache of the first ``end`` positions."""
        positions = np.arange(end)
        return np.asarray(self.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK

    def marks(self, end: int, version: int) -> NDArray[np.int64]:
        """What belongs there: nobody else has this prompt's first token, version and position."""
        return (version * 4096 + self.tokens[0]) * 4096 + np.arange(end)


class Late(AsyncModelRunnerOutput):  # type: ignore[misc]
    """An answer that is ready after a while."""

    def __init__(self, worker: StubWorker, output: ModelRunnerOutput) -> None:
        self._worker, self._output = worker, output
        self._due = time.monotonic() + worker.random.uniform(0, 2 * LATE_S)

    def get_output(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._worker.in_flight -= 1
        return self._output

    def get_kv_connector_output(self) -> None:
        """Which vLLM 0.33 asks for besides."""


class StubWorker(WorkerBase, VersionLoader):  # type: ignore[misc]
    """The worker; ``faults`` are sentences on what it should not have been asked for."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.random = random.Random(0)
        self.rows: dict[str, Row] = {}
        self.kv: NDArray[np.int64] = np.full(KV_BLOCKS * BLOCK, -1, dtype=np.int64)
        self.version, self.in_flight = 0, 0
        self.faults: list[str] = []
        self.asked: ModelRunnerOutput | None = None
        self.second = self.vllm_config.use_v2_model_runner

    # What an executor asks of it before the first step.

    def init_device(self) -> None:
        self.device = torch.device("cpu")

    def load_model(self) -> None: ...

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        about = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
        return {"layer": FullAttentionSpec(block_size=BLOCK, **about)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def set_kv_cache_layout(self, *layout: Any) -> None: ...

    def determine_available_memory(self) -> int:
        return KV_BLOCKS * int(self.get_kv_cache_spec()["layer"].page_size_bytes)

    def initialize_from_config(self, config: Any) -> None:
        assert config.num_blocks == KV_BLOCKS

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def shutdown(self) -> None: ...

    # What libra adds to workers.

    def mend(self) -> None: ...

    def load_version(self, directory: str) -> dict[str, Any]:
        """Load the version that the directory is called by."""
        wrong = [f"{self.in_flight} steps are in flight"] if self.in_flight else []
        self.version = int(Path(directory).name)
        return {"expected": {}, "wrong": wrong, "held": [], "proof_s": 0.0}

    def told(self) -> list[str]:
        """Return the faults of this rank."""
        return [f"rank {self.rank}: {fault}" for fault in self.faults]

    # A step.

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """Take a step's requests; what is drawn is asked for next."""
        gone = set(scheduled.finished_req_ids)
        if self.second:  # to which a request that was pushed back comes as a new one
            gone |= scheduled.preempted_req_ids or set()
        for name in gone:
            self.rows.pop(name, None)
        began = self._begin(scheduled) | self._continue(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        names = list(scheduled.num_scheduled_tokens)
        if self.second:  # decodes come first there
            names.sort(key=scheduled.num_scheduled_tokens.__getitem__)
        counts = scheduled.num_scheduled_tokens
        # Of two that begin in one step, one may read what the other writes: a layer first writes.
        for name in names:
            self._write(name, began[name], began[name] + counts[name])
        drawn = [self._draw(name, began[name]) for name in names]
        values = [[float(-self.version)]] * len(names)
        zeros = torch.zeros(len(names), dtype=torch.int32)
        self.asked = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=drawn,
            logprobs=LogprobsTensors(zeros.unsqueeze(1), torch.tensor(values), zeros).tolists(),
            prompt_logprobs_dict={} if self.second else dict.fromkeys(names),
        )
        return None

    def sample_tokens(self, grammar: Any) -> Late | ModelRunnerOutput:
        """Return what the step before draws, later if the next is scheduled before it ends."""
        asked, self.asked = self.asked, None
        assert asked is not None
        if not self.vllm_config.scheduler_config.async_scheduling:
            return asked
        self.in_flight += self.rank == 0  # nobody asks the others for theirs
        return Late(self, asked)

    def _begin(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """Requests that this runner does not know, and their first position to compute."""
        began = {}
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in self.rows:
                self.faults.append(f"{new.req_id} begins a second time")
            whole = new.prefill_token_ids if self.second else new.prompt_token_ids
            row = Row(list(whole), len(new.prompt_token_ids), list(new.block_ids[0]), 0)
            self.rows[new.req_id] = row
            began[new.req_id] = new.num_computed_tokens
            self._check_tokens(new.req_id)
        return began

    def _continue(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """Requests that go on, and those that the first runner takes up again."""
        began, cached = {}, scheduled.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            row, blocks = self.rows[name], cached.new_block_ids[index]
            began[name] = cached.num_computed_tokens[index]
            if name in cached.resumed_req_ids:
                row.tokens, row.blocks = list(cached.all_token_ids[name]), list(blocks[0])
                self._check_tokens(name)
            else:
                row.blocks.extend(blocks[0] if blocks else ())
                if began[name] != row.end:
                    self.faults.append(f"{name} goes on at {began[name]}, and is at {row.end}")
            known = len(row.tokens) - row.prompt
            if cached.num_output_tokens[index] != known:
                told = cached.num_output_tokens[index]
                self.faults.append(f"{name} is told to have {told} tokens and has {known}")
        return began

    def _check_tokens(self, name: str) -> None:
        row = self.rows[name]
        if row.tokens[row.prompt :] != list(range(row.prompt, len(row.tokens))):
            self.faults.append(f"{name} comes back with {row.tokens[row.prompt :]}")

    def _write(self, name: str, start: int, end: int) -> None:
        row = self.rows[name]
        if end > len(row.tokens):
            self.faults.append(f"{name} computes {end} positions of {len(row.tokens)}")
        self.kv[row.slots(end)[start:]] = row.marks(end, self.version)[start:]
        row.end = end

    def _draw(self, name: str, start: int) -> list[int]:
        """The token after what is computed, or none in the midst of a prompt."""
        row = self.rows[name]
        if not np.array_equal(self.kv[row.slots(row.end)], row.marks(row.end, self.version)):
            self.faults.append(f"{name} reads a KV cache that is not its own, from {start} on")
        if row.end < len(row.tokens):
            return []
        row.tokens.append(row.end)
        return [row.end]
