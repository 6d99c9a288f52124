"""Tasks of a taskset are played and scored by the real verifiers, in an environment of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.renderer import Renderer
from tests.agents import fake_machine
from tests.clients.catalogue import prepare

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
CALL = '<tool_call>\n{"name": "adder_add", "arguments": {"a": 0, "b": 40}}\n</tool_call>'


@pytest.fixture(scope="module")
def python() -> Path:
    home = prepare("verifiers")
    # The tools of a taskset run in a process that imports them from what is installed.
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "libra_sums.pth").write_text(f"{ROOT / 'tests/verifiers'}\n", encoding="utf-8")
    return home / "bin/python"


def test_oracle_idler_and_limits_get_the_rewards_of_the_taskset(python: Path) -> None:
    done = subprocess.run(
        [python, "-m", "tests.verifiers.play"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "oracle: 1.0" in done.stdout


def test_its_turns_are_one_exact_sequence_of_tokens_on_our_endpoint(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def agent(task: Any, base_url: str, api_key: str, model: str) -> float:
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", "tests.verifiers.one", base_url, api_key, model),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        return float(said.split()[-1])

    async def play() -> None:
        made = fake_machine(
            {"function": "verifiers_of_tests:agent", "timeout_s": 200.0},
            Renderer(tmp_path),
            tmp_path,
            model={"max_len": 4096},
        )
        try:
            await made.episodes.prepare(print)
            await made.episodes.check(0)
            result = await asyncio.wait_for(made.play([CALL, "It is 40."]), 250)
        finally:
            await made.episodes.close()
        # The fake machine refuses a prompt that does not go on exactly where the turn before ended.
        assert (result.reward, len(made.texts)) == (1.0, 1)
        assert [one.tool for one in made.returns] == ["adder_add"]

    module = ModuleType("verifiers_of_tests")
    module.agent = agent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    save_tokenizer(build_tokenizer(), tmp_path, max_len=4096)
    asyncio.run(play())
