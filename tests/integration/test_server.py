"""One real vLLM server, started by the agent on this machine, shared by all tests of this file."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import warnings
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from libra_cli.core.actions import Generate, SyncServer
from libra_cli.core.events import ServerSampled, TurnFailed, TurnGenerated
from libra_cli.core.types import TrajectoryId, VersionSpan, WeightVersion
from libra_cli.runtime.rollout.connection import Sampling, ServerUnreachable
from libra_cli.runtime.rollout.decode_check import EXPECTED, decode_gap
from libra_cli.runtime.vllm.client import ServerClient
from libra_cli.runtime.weights.probe_bounds import probe_gap
from tests import stale_decode
from tests.vllm_server import bench_of, published

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(300)]
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

PROBE = tuple(range(5, 69))
SAMPLING = Sampling(temperature=1.0, top_p=1.0, stop_token_ids=())


@dataclass
class Weights:
    """Two models of one shape, published, and what transformers says of them."""

    directories: list[Path]
    versions: list[Path]
    models: list[Any]

    def logprobs(self, index: int, token_ids: list[int]) -> list[float]:
        """Of every token but the first, each given everything before it."""
        with torch.no_grad():
            logits = self.models[index](torch.tensor([token_ids])).logits[0, :-1].float()
        chosen = torch.tensor(token_ids[1:]).unsqueeze(1)
        values = torch.log_softmax(logits, -1).gather(1, chosen).squeeze(1).tolist()
        return [float(value) for value in values]

    def logprobs_after(self, token_ids: list[int], known: int) -> list[float]:
        """Of the tokens after the next: the second model's, given the first one's keys and values
        of the ``known`` tokens before."""
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            cache = self.models[0](ids[:, :known], use_cache=True).past_key_values
            logits = self.models[1](ids[:, known:], past_key_values=cache).logits[0, :-1].float()
        chosen = ids[0, known + 1 :].unsqueeze(1)
        values = torch.log_softmax(logits, -1).gather(1, chosen).squeeze(1).tolist()
        return [float(value) for value in values]


def mean_gap(expected: Sequence[float], measured: Sequence[float]) -> float:
    """Mean absolute difference, in nats, over as many as both have."""
    gaps = [abs(one - other) for one, other in zip(expected, measured, strict=False)]
    return sum(gaps) / len(gaps)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Weights:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
    from libra_cli.node.weights.tensor_rows import whole
    from libra_cli.node.weights.versions import ProbeResult, publish

    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    directories, versions, models = [], [], []
    root = tmp_path_factory.mktemp("versions")
    for seed in range(2):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float().eval()
        with torch.no_grad():
            model.lm_head.weight.mul_(40)  # far from uniform, so that a wrong load shows
        directories.append(tmp_path_factory.mktemp(f"model{seed}"))
        model.save_pretrained(directories[-1])
        save_tokenizer(tokenizer, directories[-1], max_len=512)
        probe = ProbeResult([1, 2], [0.0])
        named = model.state_dict().items()
        done = publish(whole(named), root, version=seed, trainer_incarnation=1, probe=probe, keep=2)
        versions.append(root / done.name)
        models.append(model)
    # The server begins with a model that was exported from a checkpoint of the first.
    directories[0] = exported(directories[0], models[0], tmp_path_factory.mktemp("exported"))
    return Weights(directories, versions, models)


def exported(base: Path, model: Any, directory: Path) -> Path:
    """What ``libra export`` makes of a checkpoint with these parameters."""
    import torch.distributed.checkpoint as dcp

    from libra_cli.node.checkpoints.export import export

    order = {
        "checkpoint": str(directory / "step"),
        "urls": [],
        "credentials": {},
        "model_dir": str(base),
        "dtype": "float32",
        "out": str(directory / "model"),
        "card": {"name": "small", "base": "base", "tags": [], "body": "# small"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that there is one process
        dcp.save({"model": model.state_dict()}, checkpoint_id=directory / "step", no_dist=True)
        (directory / "step" / "checkpoint.json").write_text('{"step": 3}')
        export(order)
    return directory / "model"


@pytest.fixture(scope="module")
def begun(weights, tmp_path_factory):
    """The server, and what it thought of the probe before it had any version."""
    host = tmp_path_factory.mktemp("host")
    with bench_of(weights.directories[0], host, worker=stale_decode.WORKER) as bench:

        async def think() -> list[float]:
            while True:  # the first time vLLM compiles, which may outlast a call's deadline
                with suppress(ServerUnreachable):
                    return await bench.server.probe(PROBE, published(0))

        thought = bench.play(think)
        first = str(weights.versions[0])
        bench.play(lambda: bench.server.load(first, published(1), timeout_s=60))
        yield bench, thought


@pytest.fixture(scope="module")
def bench(begun):
    return begun[0]


def turn(prompt: list[int], *, max_tokens: int = 24, version: int = 1) -> Generate:
    return Generate(
        request=1,
        trajectory=TrajectoryId(0, 0),
        slot="local/0",
        incarnation=0,
        prompt_ids=array("i", prompt),
        max_tokens=max_tokens,
        cache_key=WeightVersion(1, version),
        priority=0,
    )


def test_nothing_is_answered_without_the_token(bench):
    async def scene():
        for said in (
            msgpack.packb("wrong"),
            msgpack.packb([0, "facts", {}]),
            b"GET / HTTP/1.1\r\n",
        ):
            reader, writer = await asyncio.open_unix_connection(bench.endpoint.path)
            writer.write(said + msgpack.packb([1, "check", {}]))
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        await bench.server.check()

    bench.play(scene)


def test_an_exported_model_computes_what_its_checkpoint_does(begun, weights):
    assert probe_gap(tuple(weights.logprobs(0, list(PROBE))), begun[1]) < 1e-4


def test_an_aborted_turn_comes_back_with_the_tokens_it_has(bench):
    async def scene():
        prompt = list(range(5, 25))
        action = replace(turn(prompt, max_tokens=450), request=77)
        # How long a server takes for its first token, and for its last, is for the machine to say.
        cut: object = None
        for delay_s in (0.2, 0.1, 0.4, 0.05, 0.8, 1.6, 3.2):
            task = asyncio.create_task(bench.server.generate(action, SAMPLING))
            await asyncio.sleep(delay_s)
            await bench.server.abort(77)
            cut = await asyncio.wait_for(task, 20)
            assert isinstance(cut, TurnGenerated), cut
            if cut.token_ids and cut.finish_reason == "abort":
                break
        assert isinstance(cut, TurnGenerated)
        assert cut.finish_reason == "abort"
        assert 0 < len(cut.token_ids) < 450
        assert len(cut.logprobs) == len(cut.token_ids)
        assert cut.spans[-1].end == len(cut.token_ids)
        # The server is well, and the turn goes on from there.
        rest = turn([*prompt, *cut.token_ids], max_tokens=8)
        again = await bench.server.generate(replace(rest, request=78), SAMPLING)
        assert isinstance(again, TurnGenerated)
        assert len(again.token_ids) == 8

    bench.play(scene)


def test_it_listens_on_a_socket_of_this_user_and_nothing_of_it_is_reached_from_outside(bench):
    async def scene():
        (state,) = [s for s in await bench.host.processes() if s.process == "server-0"]
        found = _listening(state.pid)
        assert {address.partition(":")[0] for address in found} <= {"0100007F"}
        path = Path(bench.endpoint.path)
        assert path.is_socket()  # noqa: ASYNC240
        assert path.parent.stat().st_mode & 0o777 == 0o700

    bench.play(scene)


def test_an_order_that_cannot_be_read_is_refused_and_the_server_goes_on(bench):
    async def scene():
        reader, writer = await asyncio.open_unix_connection(bench.endpoint.path)
        orders = [[1, "generate", {}], [2, "collective_rpc", {}], [3], [4, "check", {}]]
        writer.write(b"".join(map(msgpack.packb, [bench.token, *orders])))
        unpacker, answers = msgpack.Unpacker(), list[Any]()
        while len(answers) < len(orders):
            unpacker.feed(await asyncio.wait_for(reader.read(1 << 16), 20))
            answers += unpacker
        outcomes = [(call, outcome) for call, outcome, _ in answers]
        assert outcomes == [(1, "refused"), (2, "refused"), (0, "refused"), (4, "done")]
        writer.close()

    bench.play(scene)


async def _until(reading: Callable[[], Awaitable[int]], holds: Callable[[int], bool]) -> None:
    while not holds(await reading()):  # noqa: ASYNC110  each reading asks the server
        await asyncio.sleep(0)


def test_it_says_what_of_vllm_runs(bench):
    facts = bench.play(bench.server.facts)
    assert facts.engine == "runner V1, no async scheduling, no CUDA graphs"
    assert facts.kv_tokens > 512


def test_turns_of_a_connection_that_closes_are_ended(bench):
    async def running() -> int:
        reading: ServerSampled = await bench.server.sample()
        return reading.running

    async def scene():
        other = ServerClient("local/0", 0, bench.endpoint, bench.token)
        asked = [replace(turn([5, 6], max_tokens=480), request=90 + n) for n in range(8)]
        tasks = [asyncio.create_task(other.generate(a, SAMPLING)) for a in asked]
        await _until(running, lambda number: number > 0)
        await other.close()
        for done in await asyncio.gather(*tasks):
            assert isinstance(done, TurnFailed)
            assert not done.refused
        await _until(running, lambda number: number == 0)

    bench.play(scene)


def test_log_probabilities_of_generated_tokens_equal_transformers(bench, weights):
    async def scene():
        await bench.server.load(str(weights.versions[0]), published(1), timeout_s=60)
        return await bench.server.generate(turn([1, 7, 9, 11]), SAMPLING)

    done = bench.play(scene)
    assert isinstance(done, TurnGenerated)
    expected = weights.logprobs(0, [*done.prompt_ids, *done.token_ids])[3:]
    gaps = [abs(a - b) for a, b in zip(expected, done.logprobs, strict=True)]
    assert sum(gaps) / len(gaps) < 1e-4
    assert done.spans == (VersionSpan(1, 0, len(done.token_ids)),)
    assert done.newest == done.cache_key == (1, 1)


@pytest.mark.parametrize("clear", [True, False], ids=["cleared", "kept"])
def test_weights_change_in_flight_and_every_token_knows_its_version(bench, weights, clear):
    async def scene(delay_s: float):
        await bench.server.load(str(weights.versions[0]), published(1), timeout_s=60)
        before = await bench.server.sample()
        long = asyncio.create_task(bench.server.generate(turn([1, 2, 3], max_tokens=480), SAMPLING))
        await asyncio.sleep(delay_s)
        await bench.server.load(
            str(weights.versions[1]), published(2), timeout_s=60, clear_cache=clear
        )
        return await long, before, await bench.server.sample()

    for attempt in range(40):  # it may end before the load, or begin after it: then try again
        done, before, now = bench.play(lambda attempt=attempt: scene(0.01 * (attempt % 8)))
        assert isinstance(done, TurnGenerated)
        if len(done.spans) == 2:
            break
    else:
        pytest.fail("no generation was met by a load")
    first, second = done.spans
    assert (first.version, second.version) == (1, 2)
    assert (first.start, first.end, second.end) == (0, second.start, len(done.token_ids))
    assert done.newest == (1, 2)
    ids = [*done.prompt_ids, *done.token_ids]
    assert mean_gap(weights.logprobs(0, ids)[2:], done.logprobs[: first.end]) < 1e-4
    # The last token of the first version is what the second one's first step begins with.
    known = 3 + first.end - 1
    ways = [weights.logprobs(1, ids)[known:], weights.logprobs_after(ids, known)]
    gaps = [mean_gap(way, done.logprobs[first.end :]) for way in ways]
    assert gaps[not clear] < 1e-4 < 1e-2 < gaps[clear], "computed again, or not, as it was asked"
    computed = now.metrics["prefill_tokens"] - before.metrics["prefill_tokens"]
    assert computed == (3 + known + 1 if clear else 3)
    assert now.preemptions == 0, "a load pushes turns back, and says nothing of the KV cache"


def test_the_probe_tells_one_version_from_another(bench, weights):
    async def scene():
        found = []
        for version in (3, 4):
            directory = weights.versions[version % 2]
            await bench.server.load(str(directory), published(version), timeout_s=60)
            found.append(await bench.server.probe(PROBE, published(version)))
        return found

    odd, even = bench.play(scene)
    expected = [tuple(weights.logprobs(index, list(PROBE))) for index in (1, 0)]
    assert probe_gap(expected[0], odd) < 1e-4
    assert probe_gap(expected[1], even) < 1e-4
    assert probe_gap(expected[0], even) > 0.1


def test_a_layer_that_only_decoding_has_of_the_version_before_is_seen(bench, weights, tmp_path):
    stale = tmp_path / "stale"
    shutil.copytree(weights.versions[1], stale)
    stale_decode.keep(stale, "model.layers.1.mlp.down_proj")

    async def gap_of(directory: Path, version: int) -> float:
        await bench.server.load(str(directory), published(version), timeout_s=60)
        probed = await bench.server.probe(PROBE, published(version))
        expected = tuple(weights.logprobs(version % 2, list(PROBE)))
        assert probe_gap(expected, probed) < 1e-4, "neither checksums nor the probe notice"
        return await decode_gap(bench.server, SyncServer("local/0", 0, published(version)), PROBE)

    async def scene():
        loads = [(weights.versions[0], 10), (stale, 11), (weights.versions[1], 13)]
        return [await gap_of(*one) for one in loads]

    right, wrong, again = bench.play(scene)
    allowed = EXPECTED["float32", False].first
    assert max(right, again) < allowed / 10
    assert wrong > 10 * allowed


def test_kv_of_one_version_is_not_reused_under_the_next(bench, weights):
    prompt = list(range(3, 200))

    async def scene():
        await bench.server.load(str(weights.versions[0]), published(5), timeout_s=60)
        await bench.server.generate(turn(prompt, max_tokens=1, version=5), SAMPLING)
        await bench.server.load(str(weights.versions[1]), published(6), timeout_s=60)
        return await bench.server.generate(turn(prompt, max_tokens=4, version=6), SAMPLING)

    done = bench.play(scene)
    expected = weights.logprobs(1, [*done.prompt_ids, *done.token_ids])[len(prompt) - 1 :]
    gaps = [abs(a - b) for a, b in zip(expected, done.logprobs, strict=True)]
    assert sum(gaps) / len(gaps) < 1e-4


def test_what_a_turn_in_flight_computed_again_is_found_under_the_new_version(bench, weights):
    prompt = list(range(3, 260))  # two of vLLM's blocks on CPUs, and one token

    async def scene(delay_s: float):
        await bench.server.load(str(weights.versions[0]), published(5), timeout_s=60)
        begun = turn(prompt, max_tokens=200, version=5)
        long = asyncio.create_task(bench.server.generate(begun, SAMPLING))
        await asyncio.sleep(delay_s)
        await bench.server.load(str(weights.versions[1]), published(6), timeout_s=60)
        met, before = await long, await bench.server.sample()
        after = await bench.server.generate(turn(prompt, max_tokens=4, version=6), SAMPLING)
        return met, after, before, await bench.server.sample()

    for attempt in range(40):
        met, after, before, now = bench.play(lambda attempt=attempt: scene(0.01 * (attempt % 8)))
        if len(met.spans) == 2:
            break
    else:
        pytest.fail("no generation was met by a load")
    computed = now.metrics["prefill_tokens"] - before.metrics["prefill_tokens"]
    assert computed == 1, "the rest was there"
    expected = weights.logprobs(1, [*prompt, *after.token_ids])[len(prompt) - 1 :]
    assert mean_gap(expected, after.logprobs) < 1e-4, "it is of the new version"


def test_a_trajectory_goes_on_from_what_older_weights_have_computed_where_that_is_kept(
    bench, weights
):
    prompt, block = list(range(3, 200)), 128  # vLLM's block on CPUs: what is found are whole ones

    async def scene():
        await bench.server.load(str(weights.versions[0]), published(5), timeout_s=60)
        first = turn(prompt, max_tokens=1, version=5)
        await bench.server.generate(first, SAMPLING)
        second = str(weights.versions[1])
        await bench.server.load(second, published(6), timeout_s=60, clear_cache=False)
        begun = turn(prompt, max_tokens=4, version=6)
        goes_on = replace(begun, kv_since=first.cache_key)
        return [await bench.server.generate(one, SAMPLING) for one in (goes_on, begun)]

    ways = []
    for done in bench.play(scene):
        ids = [*done.prompt_ids, *done.token_ids]
        kept = weights.logprobs_after(ids, block)[len(prompt) - block - 1 :]
        fresh = weights.logprobs(1, ids)[len(prompt) - 1 :]
        ways.append([mean_gap(way, done.logprobs) for way in (kept, fresh)])
    (goes_on, begun) = ways
    assert goes_on[0] < 1e-4 < 1e-2 < goes_on[1]
    assert begun[1] < 1e-4 < 1e-2 < begun[0], "another trajectory has KV of its own version"


def test_a_request_that_is_itself_wrong_is_refused_and_not_retried(bench):
    async def scene():
        return await bench.server.generate(turn([5] * 600), SAMPLING)

    done = bench.play(scene)
    assert isinstance(done, TurnFailed)
    assert done.refused
    assert "512" in done.reason


def test_weights_that_cannot_be_loaded_silence_the_server(bench, tmp_path):
    """Last but one: the server is of no use afterwards, and must not pretend to be."""
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    (tmp_path / "manifest.json").write_text('{"tensors": {}}')

    async def scene():
        with pytest.raises(Exception, match="failed"):
            await bench.server.load(str(tmp_path), published(9), timeout_s=60)
        waiting = asyncio.create_task(bench.server.generate(turn([1, 2]), SAMPLING))
        done, _ = await asyncio.wait({waiting}, timeout=2)
        waiting.cancel()
        return done

    assert not bench.play(scene)


def test_a_killed_server_leaves_nothing_behind(bench):
    """Last."""

    async def scene():
        (state,) = [s for s in await bench.host.processes() if s.process == "server-0"]
        assert _children(state.pid) == [], "one rank is one process"
        os.kill(state.pid, signal.SIGKILL)
        stopped = await bench.host.stop("server-0", grace_s=2)
        assert not stopped.leftovers

    bench.play(scene)


def _children(pid: int) -> list[str]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in children]


def _listening(pid: int) -> list[str]:
    """Address and port, in hexadecimal, of every TCP socket on which a process listens."""
    mine = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1])
    return found
