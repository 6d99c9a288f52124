"""The entry point of the process that trains the adapters of several tenants on one model.

    python -m libra_cli.node.tenants.main config.json

It is spoken to over a control stream (``node.control``); orders are carried out one after another.

    operation          order                                          answer
    create             model, rank, alpha, targets, seed              {}
    forward_backward   model, data, loss, settings, backward          logprobs: bytes of each datum,
                                                                      loss: their sum
    step               model, settings (of AdamW)                     norm: of the gradients
    save               model, optimizer                               file: safetensors, as bytes
    load               model, file, optimizer                         {}
    unload             model                                          {}
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra_cli.config.errors import TrainerError
from libra_cli.config.training import LoraSpec
from libra_cli.node.command_queue import IdleCommand, RankServer, StopCommand
from libra_cli.node.control import Answer
from libra_cli.node.http import read_token
from libra_cli.node.rank import attempt, start_logging
from libra_cli.node.tenants.commands import TenantQueue

if TYPE_CHECKING:
    from libra_cli.node.tenants.tenants import Tenants

IDLE_S = 10.0
log = logging.getLogger("libra.tenants")


def main() -> int:
    """Serve until a stop comes, and return the exit code."""
    start_logging()
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    queue = TenantQueue()
    RankServer(queue, path=config["socket"], token=read_token(os.environ["LIBRA_TOKEN_FILE"]))
    return attempt(lambda: _serve(config, queue), queue)


def _serve(config: Mapping[str, Any], queue: TenantQueue) -> None:
    tenants = _read(config)
    queue.ready()
    log.info("ready")
    while not isinstance(command := queue.next(IDLE_S), StopCommand):
        if not isinstance(command, IdleCommand):
            queue.carry_out(command, lambda operation, order: _perform(tenants, operation, order))


def _read(config: Mapping[str, Any]) -> Tenants:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from libra_cli.node.model.packed_attention import attention_of
    from libra_cli.node.tenants.tenants import Tenants

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, config["dtype"])
    place = config["model_dir"]
    attention = attention_of(AutoConfig.from_pretrained(place))
    read = AutoModelForCausalLM.from_pretrained
    model = read(place, dtype=dtype, attn_implementation=attention).to(device)
    model.requires_grad_(False).eval()
    return Tenants(model, dtype=dtype, pass_tokens=config["pass_tokens"])


def _perform(tenants: Tenants, operation: str, order: Mapping[str, Any]) -> Answer:
    """Carry out one order. Raises TrainerError for what cannot be done."""
    who = order["model"]
    match operation:
        case "create":
            spec = LoraSpec(
                rank=order["rank"], alpha=order["alpha"], target_modules=order["targets"]
            )
            tenants.create(who, spec, seed=order["seed"])
        case "forward_backward":
            logprobs, total = tenants.forward_backward(
                who,
                order["data"],
                order["loss"],
                settings=order["settings"],
                backward=order["backward"],
            )
            return {"logprobs": [one.numpy().tobytes() for one in logprobs], "loss": total}
        case "step":
            return {"norm": tenants.step(who, order["settings"])}
        case "save":
            return {"file": tenants.save(who, optimizer=order["optimizer"])}
        case "load":
            tenants.load(who, order["file"], optimizer=order["optimizer"])
        case "unload":
            tenants.unload(who)
        case _:
            raise TrainerError(f"no operation {operation!r}")
    return {}


if __name__ == "__main__":
    sys.exit(main())
