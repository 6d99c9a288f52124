"""The HTTP service that Tinker's SDK talks to: one handler for each kind of request.

It listens on loopback, and answers nobody who does not bring the key that was printed. Requests
that take long are futures: their id is answered at once, and ``retrieve_future`` waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any, Protocol

from aiohttp import web

from libra_cli.config.errors import LibraError
from libra_cli.runtime.processes.loopback import LoopbackServer
from libra_cli.runtime.processes.stream import Answer
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.tinker.adapters import ALPHA, SCHEME, AdapterShape, SavedAdapters
from libra_cli.runtime.tinker.address import STATUS
from libra_cli.runtime.tinker.futures import Futures, Outcome, words_for_client
from libra_cli.runtime.tinker.loaded import ADAPTERS_IN_MEMORY, AdapterServers, LoadedAdapters
from libra_cli.runtime.tinker.sampling import SampleOrder, sampled
from libra_cli.runtime.tinker.sessions import (
    TRAINS,
    ClientSession,
    SessionEnded,
    Sessions,
    session_of,
)
from libra_cli.runtime.tinker.turns import Turns
from libra_cli.runtime.tinker.wire import (
    NotServed,
    read_training_pass,
    read_turn,
    write_training_output,
)

API = "/api/v1"
LONGEST_BODY = 256 * 1024**2
"""Bytes of a request; the SDK cuts training data into requests of 5 MB."""
PROTOBUF = "application/x-protobuf"
Json = dict[str, Any]
LEFT = "left"
"""The name under which the state of an adapter is saved whose client has gone away."""
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
"""The settings of an optimizer's step that a request leaves out, as the SDK has them."""


class Workers(AdapterServers, Protocol):
    """What does the work of requests (``libra_cli.runtime.tinker.hosts.TinkerHosts``)."""

    stop_token_ids: tuple[int, ...]

    async def train(self, operation: str, order: Mapping[str, Any]) -> Answer:
        """Have the trainer carry out an order."""

    async def sample(self, order: Mapping[str, Any]) -> Answer:
        """Have a server sample one sequence."""


@dataclass(slots=True)
class TrainedModel:
    """An adapter that a client trains, and the order of its requests."""

    shape: AdapterShape
    turns: Turns = field(default_factory=Turns)
    steps: int = 0
    """Steps of its optimizer, since it was created or loaded."""
    unsaved: bool = False
    """Whether it was trained since its state was saved."""

    def told(self) -> Json:
        """Return what ``libra status`` tells of it."""
        return {"rank": self.shape.rank, "steps": self.steps, "unsaved": self.unsaved}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of the recipe, as clients name it."""

    name: str
    also: frozenset[str]
    """Other names that are understood; one without an organisation stands for that of any."""
    tokenizer: str
    """The directory of its tokenizer."""
    max_len: int
    max_rank: int


class TinkerService:
    """Answers the SDK's requests, with the work of a recipe's hosts."""

    def __init__(
        self,
        model: ServedModel,
        workers: Workers,
        saved: SavedAdapters,
        *,
        sessions: Sessions | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``note`` is told, in words, what is let go of for a client that is not heard of."""
        self.key = f"tml-{secrets.token_urlsafe(24)}"
        self.model = model
        self._workers = workers
        self._saved = saved
        self._futures = Futures()
        self._models: dict[str, TrainedModel] = {}
        self._sessions = Sessions() if sessions is None else sessions
        self._loaded = LoadedAdapters(workers, saved)
        self._note = note
        self._background = Background()
        self._server: LoopbackServer | None = None

    async def start(self, port: int) -> str:
        """Listen on a port of loopback, 0 for any free one, and return the address.

        Raises:
            StateError: the port is taken.
        """
        app = web.Application(middlewares=[self._guard], client_max_size=LONGEST_BODY)
        for name, handler in self._handlers().items():
            app.router.add_post(f"{API}/{name}", _json(handler))
        app.router.add_get(STATUS, _json(self._status))
        app.router.add_get(f"{API}/healthz", _json(self._empty))
        app.router.add_get(f"{API}/get_server_capabilities", _json(self._capabilities))
        app.router.add_get(f"{API}/samplers/{{sampler}}", self._sampler)
        app.router.add_post(f"{API}/client/config", self._config)
        app.router.add_post(f"{API}/sessions/{{session}}/finish", self._finish_session)
        app.router.add_post(f"{API}/forward_backward", self._forward_backward)
        app.router.add_post(f"{API}/retrieve_future", self._retrieve)
        self._server = LoopbackServer(app)
        await self._server.start(port)
        self._background.keep("watching the leases of sessions", self._watch_leases)
        return self._server.url

    async def close(self) -> None:
        await self._background.close()
        await self._futures.close()
        for session in filter(None, map(self._sessions.end, self._sessions.names())):
            self._delete_unnamed(session)
        if self._server is not None:
            await self._server.close()

    def _handlers(self) -> Mapping[str, Callable[[Json], Awaitable[Json]]]:
        return {
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._info,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "cancel_future": self._cancel,
        }

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("X-Api-Key", "")
        if not compare_digest(given.encode(), self.key.encode()):
            return _refusal(401, "TINKER_API_KEY is not the key that libra tinker has printed")
        try:
            return await handler(request)
        except SessionEnded as error:
            return _refusal(410, words_for_client(error))
        except LibraError as error:
            return _refusal(422, words_for_client(error))
        except (KeyError, TypeError, ValueError) as error:
            return _refusal(422, f"a wrong request: {error!r}")

    # -- sessions -------------------------------------------------------------------------------

    async def _empty(self, told: Json) -> Json:
        return {"status": "ok"}

    async def _config(self, request: web.Request) -> web.Response:
        told = {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False}
        answer = web.json_response(told)
        # The SDK asks once, over a connection of its own that it never closes.
        answer.force_close()
        return answer

    async def _dynamic_config(self, told: Json) -> Json:
        return {"sample_cancel_enabled": True}

    async def _capabilities(self, told: Json) -> Json:
        known = {"trainable": True, "sampleable": True, "max_context_length": self.model.max_len}
        return {"supported_models": [{"model_name": self.model.name, **known}]}

    async def _create_session(self, told: Json) -> Json:
        words = "adapters are on attention and MLP layers; train_unembed adds none to the output"
        return {"session_id": self._sessions.open(), "info_message": words}

    async def _heartbeat(self, told: Json) -> Json:
        self._sessions.hear(told["session_id"])
        return {"type": "session_heartbeat"}

    async def _telemetry(self, told: Json) -> Json:
        return {"status": "accepted"}

    async def _finish_session(self, request: web.Request) -> web.Response:
        await self._end_session(request.match_info["session"], save_as=None)
        return web.json_response({})

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(self._sessions.lease_s / 10)
            await self.end_silent_sessions()

    async def end_silent_sessions(self) -> None:
        """Let go of what sessions have of whose clients nothing was heard for a lease; adapters
        that were trained since they were saved are saved first."""
        # One at a time: others may be heard of while what one has is saved.
        while silent := self._sessions.silent():
            name = silent[0]
            kept = await self._end_session(name, save_as=LEFT)
            words = f"nothing was heard of client {name} for {self._sessions.lease_s:.0f} s"
            self._note("; ".join([f"{words}: its adapters have left memory", *kept]))

    async def _end_session(self, name: str, *, save_as: str | None) -> list[str]:
        """Let go of all that a session has, in the memory of hosts; return, in words, what of it
        was saved, and what could not be."""
        session = self._sessions.end(name)
        await self._futures.cancel_all(name)
        if session is None:
            return []
        kept = []
        for model_id in session.models:
            model = self._models.get(model_id)
            if model is not None and model.unsaved and save_as is not None:
                kept.append(await self._keep(model_id, save_as))
            # A process that trains no more has failed, and the service with it, which says why.
            with contextlib.suppress(LibraError):
                await self._workers.train("unload", {"model": model_id})
            self._models.pop(model_id, None)
        for path in set(session.samplers.values()) - self._sessions.sampled_paths() - {None}:
            await self._loaded.drop(str(path))
        self._delete_unnamed(session)
        return kept

    async def _keep(self, model_id: str, name: str) -> str:
        """Save the state of a model whose client is gone, and return whether it is, in words."""
        try:
            return "saved " + await self._save(model_id, "weights", name)
        except LibraError as error:
            return f"{model_id} is lost: {words_for_client(error)}"

    def _delete_unnamed(self, session: ClientSession) -> None:
        for path in session.unnamed:
            self._saved.delete(path)

    def status(self) -> Json:
        """Return what ``libra status`` tells: clients, with the seconds since each was heard of,
        and the adapters that they train."""
        return {
            "format": 1,
            "model": self.model.name,
            "requests": self._futures.under_way(),
            "adapters_on_servers": len(self._loaded),
            "most_adapters_on_servers": ADAPTERS_IN_MEMORY,
            "clients": [
                {
                    "client": name,
                    "heard_s": heard_s,
                    "samplers": len(session.samplers),
                    "adapters": [
                        {"model": one, **self._models[one].told()}
                        for one in session.models
                        if one in self._models
                    ],
                }
                for name, heard_s, session in self._sessions.heard()
            ],
        }

    async def _status(self, told: Json) -> Json:
        return self.status()

    # -- training -------------------------------------------------------------------------------

    async def _create_model(self, told: Json) -> Json:
        self._check_base(told["base_model"])
        if told.get("optimizer_config", {}).get("type", "adamw") != "adamw":
            raise NotServed("of optimizers adamw is served")
        lora = told.get("lora_config") or {"rank": self.model.max_rank}
        shape, model_id = (
            AdapterShape.of(lora),
            f"{told['session_id']}{TRAINS}{told['model_seq_id']}",
        )
        seed = lora.get("seed")
        return self._begin(model_id, lambda: self._create(model_id, shape, seed))

    def _begin(self, model_id: str, work: Callable[[], Coroutine[Any, Any, Outcome]]) -> Json:
        """Begin to create a model; one that was asked for before is known."""
        models = self._sessions.hear_of(model_id).models
        if model_id not in models:
            models[model_id] = self._futures.begin(work(), owner=session_of(model_id))
        return {"request_id": models[model_id], "model_id": model_id}

    async def _create(self, model_id: str, shape: AdapterShape, seed: int | None) -> Outcome:
        if not 1 <= shape.rank <= self.model.max_rank:
            most = self.model.max_rank
            raise NotServed(f"rank {shape.rank}: ranks of 1 to {most} are served (--max-rank)")
        seed = secrets.randbits(31) if seed is None else seed
        order = {"rank": shape.rank, "alpha": ALPHA, "targets": shape.targets, "seed": seed}
        await self._workers.train("create", {"model": model_id, **order})
        self._models[model_id] = TrainedModel(shape)
        return {"model_id": model_id, "type": "create_model"}

    async def _info(self, told: Json) -> Json:
        model_id, name = told["model_id"], self.model.name
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_data": {"model_name": name, "tokenizer_id": self.model.tokenizer},
            "is_lora": True,
            "lora_rank": self._trained(model_id).shape.rank,
            "model_name": name,
        }

    async def _forward_backward(self, request: web.Request) -> web.Response:
        message = await request.read()
        model_id, number = read_turn(message)

        async def work() -> Outcome:
            asked = read_training_pass(message)
            order = {
                "model": model_id,
                "data": asked.data,
                "loss": asked.loss,
                "settings": asked.settings,
                "backward": not asked.forward_only,
            }
            answer = await self._workers.train("forward_backward", order)
            return write_training_output(answer["logprobs"], {"loss:sum": answer["loss"]})

        return web.json_response(self._in_turn(model_id, number, work))

    async def _optim_step(self, told: Json) -> Json:
        async def work() -> Outcome:
            order = {"model": told["model_id"], "settings": _adam(told["adam_params"])}
            answer = await self._workers.train("step", order)
            model = self._trained(told["model_id"])
            model.steps, model.unsaved = model.steps + 1, True
            return {"metrics": {"grad_norm:mean": answer["norm"]}}

        return self._in_turn(told["model_id"], told["seq_id"], work)

    def _in_turn(
        self, model_id: str, number: int, work: Callable[[], Coroutine[Any, Any, Outcome]]
    ) -> Json:
        """Begin a request of a model when its turn comes; one that was sent before is known.

        ``work`` reads the request, too: one that is refused before it has a turn would leave those
        that follow it waiting for that.
        """
        turns = self._trained(model_id).turns

        async def waiting() -> Outcome:
            async with turns.turn(number):
                return await work()

        if number not in turns.known:
            turns.known[number] = self._futures.begin(waiting(), owner=session_of(model_id))
        return {"request_id": turns.known[number], "model_id": model_id}

    def _trained(self, model_id: str) -> TrainedModel:
        if model_id in self._models:
            return self._models[model_id]
        left = f"{SCHEME}{model_id}/weights/{LEFT}"
        hint = (
            f"nothing was heard of its client: go on from {left}" if self._saved.has(left) else ""
        )
        raise NotServed(f"there is no model {model_id}", hint=hint)

    # -- saving and loading ---------------------------------------------------------------------

    async def _save_weights(self, told: Json) -> Json:
        async def work() -> Outcome:
            path = await self._save(told["model_id"], "weights", told.get("path"))
            return {"path": path, "type": "save_weights"}

        return self._in_turn(told["model_id"], told["seq_id"], work)

    async def _save_for_sampler(self, told: Json) -> Json:
        async def work() -> Outcome:
            path = await self._save(told["model_id"], "sampler_weights", told.get("path"))
            if told.get("sampling_session_seq_id") is None:
                return {"path": path, "type": "save_weights_for_sampler"}
            session = self._sessions.hear_of(told["model_id"])
            session.unnamed.append(path)
            sampler = await self._new_sampler(session, path)
            return {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}

        return self._in_turn(told["model_id"], told["seq_id"], work)

    async def _save(self, model_id: str, kind: str, name: str | None) -> str:
        order = {"model": model_id, "optimizer": kind == "weights"}
        answer = await self._workers.train("save", order)
        model = self._trained(model_id)
        config = model.shape.config(self.model.name)
        path = self._saved.save(model_id, kind, name, config=config, tensors=answer["file"])
        await self._loaded.drop(path)
        model.unsaved = model.unsaved and kind != "weights"
        return path

    async def _load_weights(self, told: Json) -> Json:
        path, with_optimizer = told["path"], bool(told["optimizer"])
        model_id = told.get("model_id") or f"{told['session_id']}{TRAINS}{told['model_seq_id']}"

        async def work() -> Outcome:
            tensors = self._saved.load(path)[1]
            order = {"model": model_id, "file": tensors, "optimizer": with_optimizer}
            await self._workers.train("load", order)
            model = self._trained(model_id)
            model.steps, model.unsaved = 0, False
            return {"path": path, "model_id": model_id, "type": "load_weights"}

        if told.get("model_id") is None:
            shape = self._saved.shape(path)

            async def created() -> Outcome:
                await self._create(model_id, shape, None)
                return await work()

            return self._begin(model_id, created)
        return self._in_turn(model_id, told["seq_id"], work)

    async def _weights_info(self, told: Json) -> Json:
        shape = self._saved.shape(told["tinker_path"])
        return {"base_model": self.model.name, "is_lora": True, "lora_rank": shape.rank}

    # -- sampling -------------------------------------------------------------------------------

    async def _create_sampling_session(self, told: Json) -> Json:
        path = told.get("model_path")
        if path is None:
            self._check_base(told["base_model"])
        return {
            "type": "create_sampling_session",
            "sampling_session_id": await self._new_sampler(
                self._sessions.hear(told["session_id"]), path
            ),
        }

    async def _new_sampler(self, session: ClientSession, path: str | None) -> str:
        """Begin a sampling session; servers load its adapter now, so that who asks for a wrong one
        hears of it."""
        async with self._loaded.used(path):
            name = f"sampler-{secrets.token_hex(8)}"
            session.samplers[name] = path
        return name

    async def _sampler(self, request: web.Request) -> web.Response:
        name = request.match_info["sampler"]
        _, path = self._sessions.sampler(name)
        told = {"sampler_id": name, "base_model": self.model.name, "model_path": path}
        return web.json_response(told)

    async def _sample(self, told: Json) -> Json:
        sampler = told.get("sampling_session_id")
        owner, path = (
            ("", told.get("model_path")) if sampler is None else self._sessions.sampler(sampler)
        )
        order = SampleOrder.of(
            told, max_len=self.model.max_len, stop_token_ids=self._workers.stop_token_ids
        )

        async def work() -> Outcome:
            async with self._loaded.used(path) as adapter:
                return await sampled(order, adapter, self._workers.sample)

        return {
            "request_id": self._futures.begin(work(), owner=owner),
            "sample_sequence_ids": [secrets.token_hex(8) for _ in range(order.samples)],
        }

    # -- futures --------------------------------------------------------------------------------

    async def _retrieve(self, request: web.Request) -> web.Response:
        name = (await request.json())["request_id"]
        try:
            outcome = await self._futures.outcome(name)
        except KeyError:
            return _refusal(404, f"there is no request {name}, or its answer is not kept any more")
        if outcome is None:
            waiting = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(waiting)
        if isinstance(outcome, bytes):
            return web.Response(body=outcome, content_type=PROTOBUF)
        return web.json_response(outcome)

    async def _cancel(self, told: Json) -> Json:
        self._futures.cancel(told["request_id"])
        return {}

    def _check_base(self, name: str) -> None:
        known = {self.model.name, *self.model.also}
        if name not in known and name.rpartition("/")[2] not in known:
            raise NotServed(
                f"{name} is not served here: the base model is {self.model.name}",
                hint=f"if it is the same model, libra tinker RECIPE --served-model-name {name}",
            )


def _adam(given: Json) -> dict[str, float]:
    """Return the settings of an optimizer's step; raises NotServed for another optimizer's."""
    if given.get("type", "adamw") != "adamw":
        raise NotServed("of optimizers adamw is served")
    unset = {"weight_decay": 0.0, "grad_clip_norm": 0.0}
    return {key: float(given.get(key, usual)) for key, usual in (ADAM | unset).items()}


def _json(handler: Callable[[Json], Awaitable[Json]]) -> Any:
    """Return a handler of aiohttp's that reads JSON and answers with it."""

    async def handle(request: web.Request) -> web.Response:
        told = await request.read()
        return web.json_response(await handler(json.loads(told) if told else {}))

    return handle


def _refusal(status: int, words: str) -> web.Response:
    return web.json_response({"error": words, "detail": words}, status=status)
