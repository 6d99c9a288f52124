"""A server of Chat Completions in a thread, for who asks it from a thread of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class ChatThread:
    """Answers requests with the message that ``says`` returns, or with status 503 for None."""

    def __init__(self, says: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> None:
        self.says = says
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.finish_reason = "stop"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                outer.keys.append(self.headers["Authorization"])
                message = outer.says(body)
                choice = {"message": message, "finish_reason": outer.finish_reason}
                told = json.dumps({"choices": [choice]}).encode()
                self.send_response(200 if message is not None else 503)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer for as long as this is open."""
        thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()
