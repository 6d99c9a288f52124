"""A vLLM engine in the process of its server: turns in, tokens out, versions loaded in between.

A server of vLLM's own has three processes (HTTP, engine, worker) and turns every token into text, a
dictionary and JSON on the way. Here the engine core is stepped by the thread that also speaks to
the controller, and of a finished turn two arrays are left. With one tensor-parallel rank its worker
is in this process too; of several each has a process of its own.

Nothing is generated while a version is loaded, since that happens between two steps. So the version
of a token is the one that was loaded when its step began.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
)
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import SchedulerStats

from libra_cli.config.errors import WeightsError
from libra_cli.node.rollout import int8_linear
from libra_cli.node.rollout.cpu_routes import FLAG
from libra_cli.node.rollout.draft_head import HEADS
from libra_cli.node.rollout.draft_switch import DraftSwitch
from libra_cli.node.rollout.prompt_images import PromptImages
from libra_cli.node.rollout.proof import prove_loaded
from libra_cli.node.rollout.served_adapters import ServedAdapters
from libra_cli.node.rollout.stop_strings import StopStrings
from libra_cli.node.rollout.turn import Answer, TurnRefused, TurnTokens, reason_of

UNKNOWN_VERSION = "default"
"""The label of tokens that were generated before any version was loaded."""


class VllmEngine:
    """An engine core of vLLM. It belongs to one thread."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Load the model that vLLM's command-line ``arguments`` describe."""
        int8_linear.register()
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        records = FLAG in arguments and current_platform.is_cpu()
        given = [one for one in arguments if not (records and one == FLAG)]
        told = EngineArgs.from_cli_args(parser.parse_args(given))
        config = told.create_engine_config(UsageContext.OPENAI_API_SERVER)
        if current_platform.is_cpu():  # which has set "spawn": each rank would import vLLM again
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._client = InprocClient(
            config,
            Executor.get_class(config),
            log_stats=True,
            executor_fail_callback=_die_with_a_worker,
        )
        self._core = self._client.engine_core
        self._scheduler: Any = self._core.scheduler
        self._max_len: int = config.model_config.max_model_len
        self._vocabulary: int = config.model_config.get_vocab_size()
        cache = config.cache_config
        self.kv_tokens: int = (cache.num_gpu_blocks or 0) * cache.block_size
        """Capacity of the KV cache, in tokens."""
        self.about: str = self._core.collective_rpc("tell_engine")[0]
        """What of vLLM's engine runs, in words."""
        self._images = PromptImages(config.model_config.model)
        self._turns: dict[str, TurnTokens] = {}
        self._adapters = ServedAdapters()
        self._stops = StopStrings(config.model_config.tokenizer)
        self._label = UNKNOWN_VERSION
        self._counters: Counter[str] = Counter()
        self._is_asleep = False
        self._pushed_back: set[str] = set()
        """Turns that a load has pushed back, until vLLM tells of it."""
        self._drafts: DraftSwitch | None = None
        self._core.collective_rpc("mend")
        if config.speculative_config is not None:
            self._drafts = DraftSwitch()
        self._has_head = getattr(config.speculative_config, "method", "") in HEADS
        if self._has_head:
            self._prove_head(str(config.speculative_config.draft_model_config.model))
        self._records = records
        """Whether a worker of ours keeps the experts of tokens, in place of vLLM's."""
        if records:
            self._core.collective_rpc("record_routes")

    def _prove_head(self, directory: str) -> None:
        """Compare the head that drafts, as workers hold it, with its files.

        Raises:
            WeightsError: it is not the one in the files, or it cannot be told.
        """
        proof = prove_loaded(self._core.collective_rpc("tell_head"))
        if wrong := [*proof.different, *proof.untraced]:
            raise WeightsError(
                f"the head that drafts is not the one in {directory}: {'; '.join(wrong[:3])}",
                hint="rollout: {speculative: null}, or a head of a kind that libra help scheduler "
                "names",
            )

    @property
    def busy(self) -> bool:
        """Whether a step would do anything: not if nothing is asked for, nor while paused."""
        return bool(self._scheduler.has_requests() or self._core.batch_queue)

    def add(self, name: str, order: Mapping[str, Any]) -> None:
        """Begin the turn of a controller's ``order``, under a ``name`` that no other turn has.

        Raises:
            TurnRefused: the prompt is too long, not of this model's tokens, or its images are of
                other lengths, or there is no such adapter.
        """
        prompt_ids = array("i", order["prompt_ids"]).tolist()
        self._check(prompt_ids)
        features = self._images.features(order["images"]) if order["images"] else None
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt_ids,
            mm_features=features,
            sampling_params=_sampling_params(
                order["max_tokens"],
                order["temperature"],
                order["top_p"],
                tuple(order["stop_token_ids"]),
                bool(order["to_the_end"]),
                bool(order["score_prompt"]),
                order["routes_from"],
                order.get("top_k", -1),
                order.get("seed"),
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapters.request(order.get("adapter")),
            # KV is reused only under the same salt: that of older versions where it is asked for.
            cache_salt=order["cache_salt"],
            data_parallel_rank=None,
            priority=order["priority"],
        )
        if stops := order.get("stop"):
            self._stops.watch(request, stops)
        self._client.add_request(request)
        self._turns[name] = TurnTokens(
            prompt_tokens=len(prompt_ids), routes_from=order["routes_from"]
        )

    def add_adapter(self, name: str, config: str, tensors: bytes) -> None:
        """Load an adapter of PEFT's files, which turns may name then.

        Raises:
            ValueError: this engine takes none, or none of this form or rank.
        """
        request = self._adapters.add(name, config, tensors)
        try:
            self._core.add_lora(request)
        except Exception:
            self._adapters.remove(name)
            raise

    def remove_adapter(self, name: str) -> None:
        """Let go of an adapter that no turn under way names; raises TurnRefused if it has none."""
        self._core.remove_lora(self._adapters.remove(name))

    def _check(self, prompt_ids: Sequence[int]) -> None:
        length = len(prompt_ids)
        if not 0 < length < self._max_len:
            raise TurnRefused(
                f"the prompt has {length} tokens; it may have 1 to {self._max_len - 1} of the "
                f"{self._max_len} of a context"
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocabulary:
            raise TurnRefused(f"the prompt has tokens that are not below {self._vocabulary}")

    def step(self) -> list[tuple[str, Answer]]:
        """Generate a token of every running turn; return those that ended."""
        if self._drafts is None:
            return self._ended(self._client.get_output())
        return self._step_with(self._drafts)

    def _step_with(self, switch: DraftSwitch) -> list[tuple[str, Answer]]:
        """A step with drafts or without, whichever the switch chooses."""
        running: Sequence[Any] = self._scheduler.running
        drafts = switch.choose(len(running))
        if not drafts:
            for request in running:
                request.spec_token_ids.clear()
        if self._has_head:
            # Of none the head computes what it will need of these tokens, and drafts nothing.
            none = [0] * (self._scheduler.max_num_running_reqs + 1)
            self._scheduler.dynamic_sd_lookup = None if drafts else none
        known, started = sum(map(_is_decoding, running)), time.monotonic()
        outputs = self._client.get_output()
        seconds, tokens = time.monotonic() - started, self._counters["generated_tokens"]
        ended = self._ended(outputs)
        # A step with a prompt in it says nothing of drafts.
        if known and known == len(outputs.outputs) and all(map(_is_decoding, running)):
            tokens = self._counters["generated_tokens"] - tokens
            switch.observe(known, drafts=drafts, tokens=tokens, seconds=seconds)
        self._counters["draft_steps"] += drafts
        return ended

    def _ended(self, outputs: EngineCoreOutputs) -> list[tuple[str, Answer]]:
        """The turns that ended with a step's outputs; the others grow by theirs."""
        ended = []
        for output in outputs.outputs:
            turn = self._turns.get(output.request_id)
            self._count(output)
            if turn is None:  # it was aborted while this step ran
                continue
            kept = self._stops.tokens_kept(output.request_id, output.new_token_ids)
            self._grow(turn, output, kept)
            if output.finish_reason is not None or kept is not None:
                del self._turns[output.request_id]
                self._stops.forget(output.request_id)
                if output.finish_reason is None:
                    self._client.abort_requests([output.request_id])
                self._add_routes(output.request_id, turn)
                reason = reason_of(output) if kept is None else "stop"
                ended.append((output.request_id, turn.answer(reason)))
        self._counters["steps"] += 1
        if outputs.scheduler_stats is not None:
            self._count_all(outputs.scheduler_stats)
        return ended

    def _count_all(self, stats: SchedulerStats) -> None:
        cache = stats.prefix_cache_stats
        self._counters["prefix_queries"] += cache.queries
        self._counters["prefix_hits"] += cache.hits
        again = cache.preempted_queries - cache.preempted_hits
        self._counters["prefill_tokens"] += cache.queries - cache.hits + again
        drafts = stats.spec_decoding_stats
        if drafts is not None:
            self._counters["draft_tokens"] += drafts.num_draft_tokens
            self._counters["accepted_tokens"] += drafts.num_accepted_tokens

    def _grow(self, turn: TurnTokens, output: EngineCoreOutput, kept: int | None) -> None:
        # The log-probability of the token itself is the first of each row.
        if output.new_prompt_logprobs_tensors is not None:
            turn.prompt_logprobs.extend(output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist())
        if output.new_token_ids:
            turn.grow(output.new_token_ids[:kept], self._label)
        if output.routed_experts is not None:
            turn.routes.append(output.routed_experts)
        if output.new_logprobs is not None:
            turn.logprobs.extend(output.new_logprobs.logprobs[:kept, 0].tolist())

    def _add_routes(self, name: str, turn: TurnTokens) -> None:
        """The experts of all its tokens but the last, of which nothing was computed."""
        if self._records:
            found = self._core.collective_rpc("routes_of", args=(name,))[0]
            last = turn.prompt_tokens + len(turn.token_ids) - 1
            turn.routes.append(found[turn.routes_from : last])

    def _count(self, output: EngineCoreOutput) -> None:
        self._counters["generated_tokens"] += len(output.new_token_ids)
        queued = None
        for event in output.events or ():
            if event.type == EngineCoreEventType.PREEMPTED:
                self._count_preemption(output.request_id)
            elif event.type == EngineCoreEventType.QUEUED:
                queued = event.timestamp
            elif queued is not None:
                self._counters["queue_time_s_sum"] += event.timestamp - queued
                self._counters["queue_time_s_count"] += 1
                queued = None

    def _count_preemption(self, name: str) -> None:
        """Count a turn that lost its place for want of KV cache; a load pushes back all that run,
        once each."""
        if name in self._pushed_back:
            self._pushed_back.discard(name)
        else:
            self._counters["preemptions"] += 1

    def abort(self, name: str) -> Answer | None:
        """End a turn and return what there is; None if it has ended."""
        turn = self._turns.pop(name, None)
        if turn is None:
            return None
        self._pushed_back.discard(name)
        self._stops.forget(name)
        self._client.abort_requests([name])
        self._add_routes(name, turn)
        return turn.answer("abort")

    def prepare(self, directory: str) -> bool:
        """Have workers bring a version into memory beside the turns; tells whether they have."""
        return all(self._core.collective_rpc("prepare_version", kwargs={"directory": directory}))

    def load(
        self,
        directory: str,
        label: str,
        *,
        partly: bool,
        clear_cache: bool,
        tell: Callable[[list[Any]], None],
    ) -> Answer:
        """Load a version in place and say what of it is not held as it was published.

        An adapter is merged into the base model's tensors (``merged_weights``).
        Turns in flight are kept; their contexts are computed anew by the new version and cached
        under its ``label``, or without ``clear_cache`` stay as older ones have computed them, as
        does the cache. Before it loads, ``tell`` is given the turns that ended while the steps
        begun before were awaited. If the load fails or anything differs, nothing is generated any
        more: the engine may hold parts of two versions. With ``partly`` it goes on if tensors
        cannot be found in it, as long as none found differs.

        Raises:
            RuntimeError: it is asleep.
        """
        if self._is_asleep:
            raise RuntimeError(f"{label} cannot be loaded: this server is asleep")
        started = time.monotonic()
        tell(self._pause(clear_cache=clear_cache))  # now: a load that fails would lose them
        paused = time.monotonic()
        arguments = {"directory": directory}
        workers = self._core.collective_rpc("load_version", kwargs=arguments)
        proof = prove_loaded(workers)
        loaded = time.monotonic()
        if not proof.different and (partly or not proof.untraced):
            self._label = label
            if clear_cache:
                self._cache_under(label)
            if self._has_head:  # which is version 0 of itself
                self._counters["draft_lag"] = int(label.rpartition("v")[2])
            self._core.resume_scheduler()
        return {
            "load_s": loaded - paused,
            "proof_s": max(worker["proof_s"] for worker in workers),
            "paused_s": time.monotonic() - started,
            "different": list(proof.different),
            "untraced": list(proof.untraced),
        }

    def _pause(self, *, clear_cache: bool) -> list[Any]:
        """Generate nothing from now on, and with ``clear_cache`` keep nothing cached; return the
        turns that ended while the steps begun before were awaited."""
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        ended = []
        while self._core.batch_queue:
            ended += self.step()
        if clear_cache:
            self._pushed_back |= {request.request_id for request in self._scheduler.running}
        # The cache of encoded images stays as well: versions all have the same vision tower.
        self._core.pause_scheduler("keep", clear_cache=clear_cache)
        return ended

    def _cache_under(self, salt: str) -> None:
        """Cache what turns compute from now on, which is their whole contexts, under a ``salt``."""
        for request in self._scheduler.requests.values():
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()

    def sleep(self) -> list[Any]:
        """Give back weights and KV cache, and keep process and compiled graphs; return the turns
        that ended meanwhile. Until ``wake`` and a load, nothing is generated.

        Raises:
            RuntimeError: turns are in it.
        """
        if self._is_asleep:
            return []
        if self._turns:
            raise RuntimeError(f"this server cannot sleep: {len(self._turns)} turns are in it")
        ended = self._pause(clear_cache=True)
        self._core.collective_rpc("fall_asleep")
        self._is_asleep, self._label = True, UNKNOWN_VERSION
        return ended

    def wake(self) -> None:
        """Take memory again; the next load has it generate."""
        if self._is_asleep:
            self._core.collective_rpc("take_memory")
            self._is_asleep = False

    def counters(self) -> dict[str, float]:
        """Return its gauges of now, and its counters since the start.

        ``running`` and ``waiting`` are turns, ``kv_use`` is a share of the KV cache; ``steps``,
        ``generated_tokens``, ``preemptions``, ``prefix_queries`` and ``prefix_hits`` (tokens) are
        counts, and so is ``prefill_tokens``, of contexts that were computed, once or again;
        ``queue_time_s_sum`` and ``queue_time_s_count`` are seconds that turns waited. With
        speculative decoding also: ``draft_steps``, ``draft_tokens`` and ``accepted_tokens``; with a
        head, and once a version was loaded, ``draft_lag``: the steps of training that it is behind.
        """
        running, waiting = self._scheduler.get_request_counts()
        use = float(self._scheduler.get_kv_cache_usage())
        return {"running": running, "waiting": waiting, "kv_use": use, **self._counters}

    def close(self) -> None:
        self._client.shutdown()


def _is_decoding(request: Any) -> bool:
    """Whether all of a request's prompt has been computed."""
    return bool(request.num_computed_tokens >= request.num_prompt_tokens)


@lru_cache(maxsize=4096)
def _sampling_params(
    max_tokens: int,
    temperature: float,
    top_p: float,
    stop_token_ids: tuple[int, ...],
    to_the_end: bool,
    score_prompt: bool,
    routes_from: int,
    top_k: int,
    seed: int | None,
) -> SamplingParams:
    """One object for each kind of sampling: vLLM checks all its fields when it is made."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=to_the_end,
        logprobs=0,
        prompt_logprobs=0 if score_prompt else None,
        detokenize=False,
        routed_experts_prompt_start=routes_from,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _die_with_a_worker() -> None:
    """A worker's process has ended: end this one, so that its host's agent reports it."""
    os._exit(1)
