"""The agents of one host: commands that the controller starts over this process's stdin and stdout.

It listens on a port of loopback, where its commands find the controller's endpoint. When the stream
ends, every command is killed and its directory removed; what has left its process group carries the
marks of the run, and the host's agent ends it with that.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from pathlib import Path
from typing import Any

from libra_cli.envs.agents.carried import CHUNK, CarriedPort, standard_streams
from libra_cli.envs.agents.messages import MessageReader, Say, message, unpacked_files
from libra_cli.envs.agents.workplace import CommandJob, StoppableJob, Workplace


class AgentHost:
    """Everything of this process, on one event loop."""

    def __init__(self, root: Path, output: asyncio.StreamWriter) -> None:
        self._root = root
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._workplace: Workplace | None = None
        self._url = ""
        self._running: dict[int, StoppableJob] = {}
        self._carried = CarriedPort(output)

    async def serve(self, orders: asyncio.StreamReader) -> None:
        """Do what the controller says until it says no more."""
        self._url = f"http://127.0.0.1:{await self._carried.open()}"
        reader = MessageReader()
        try:
            while data := await orders.read(CHUNK):
                for say, number, body in reader.feed(data):
                    self._take(say, number, body)
        finally:
            self._carried.close()
            for running in self._running.values():
                running.kill()

    def _take(self, say: Say, number: int, body: Any) -> None:
        match say:
            case "hello":
                self._tell("ready", 0, self._begin(body))
            case "start":
                self._start(number, body)
            case "kill" if number in self._running:
                self._running[number].kill()
            case _:
                self._carried.take(say, number, body)

    def _begin(self, body: Any) -> str:
        directory = self._root / "files"
        try:
            unpacked_files(body["files"], directory)
        except OSError as error:
            return f"its files cannot be written: {error}"
        workplace = Workplace(
            body["command"],
            body["env"],
            directory if body["files"] else None,
            self._root / "jobs",
        )
        self._workplace = workplace
        missing = workplace.missing()
        return f"there is no program {missing!r}" if missing else ""

    def _tell(self, say: Say, number: int, body: Any = None) -> None:
        self._output.write(message(say, number, body))

    # -- commands ---------------------------------------------------------------------------------

    def _start(self, number: int, body: Any) -> None:
        assert self._workplace is not None
        told = CommandJob(root_url=f"{self._url}/t/{body['api_key']}", **body)
        job = self._running[number] = StoppableJob(self._workplace, told)
        try:
            threading.Thread(target=self._run, args=(number, job), daemon=True).start()
        except RuntimeError as error:  # no more threads: the others go on
            self._ended(number, str(error))

    def _run(self, number: int, job: StoppableJob) -> None:
        """Run a job in a thread of its own."""
        try:
            end = job.run()
            body: Any = [end.code, end.words, end.flooded]
        except OSError as error:
            body = str(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is told any more
            self._loop.call_soon_threadsafe(self._ended, number, body)

    def _ended(self, number: int, body: Any) -> None:
        del self._running[number]
        self._tell("ended", number, body)


async def _serve() -> None:
    orders, output = await standard_streams()
    with tempfile.TemporaryDirectory(prefix="libra-agents-", ignore_cleanup_errors=True) as root:
        await AgentHost(Path(root), output).serve(orders)


def main() -> None:
    """Serve the controller until it closes stdin."""
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
