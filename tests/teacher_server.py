"""A teacher as a user starts one: vLLM's own OpenAI-compatible server of a model directory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

START_S = 240.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def teacher_server(
    model_dir: Path, log: Path, *, max_len: int, key: str = "", name: str = "teacher"
) -> Iterator[str]:
    """Serve it, and tell the base URL; nothing of it is left afterwards."""
    port = free_port()
    flags = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--served-model-name": name,
        "--dtype": "float32",
        "--max-model-len": str(max_len),
        "--max-num-seqs": "8",
    }
    serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    argv = [*serve, "--enforce-eager", *(part for flag in flags.items() for part in flag)]
    environment = {
        **os.environ,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        **({"VLLM_API_KEY": key} if key else {}),
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            argv, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait(process, port, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return
        if process.poll() is not None:
            break
        time.sleep(0.5)
    pytest.fail(f"the teacher does not serve:\n{log.read_text()[-3000:]}")
