"""The adapters of several tenants in one model, each with an optimizer of its own.

PEFT computes with the adapter that is active, and only that one's parameters take gradients, so
what a tenant's request comes to does not depend on which others were served before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from libra_cli.config.errors import TrainerError
from libra_cli.config.training import LoraSpec
from libra_cli.node.model.adapter import add_adapter
from libra_cli.node.model.logprobs import token_logprobs
from libra_cli.node.tenants.datum import TenantDatum, passes
from libra_cli.node.tenants.losses import DEFAULTS, loss_named

PREFIX = "base_model.model."
"""PEFT's own beginning of the names in an adapter's file."""
STATE = "optimizer."
"""The beginning of the names of an optimizer's tensors, in a saved state."""


@dataclass(slots=True)
class Tenant:
    """An adapter: its name in PEFT, its parameters by their names in its file, its optimizer."""

    name: str
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW


@contextmanager
def _all_or_none(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Put gradients back if what adds to them fails: a client's next step is sent already, and
    would be of a part of the batch."""
    before = [None if one.grad is None else one.grad.clone() for one in parameters]
    try:
        yield
    except BaseException:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        raise


class Tenants:
    """The model, and the adapters that are trained on it. It belongs to one thread."""

    def __init__(self, model: Any, *, dtype: torch.dtype, pass_tokens: int) -> None:
        """``pass_tokens`` are the most that one pass computes, padding included."""
        self._model: nn.Module = model
        read = int(model.get_input_embeddings().num_embeddings)
        head = model.get_output_embeddings()
        # Models with images may read more tokens than they say (mllama).
        self._vocabulary = read, read if head is None else int(head.weight.shape[0])
        self._dtype = dtype
        self._pass_tokens = pass_tokens
        self._tenants: dict[str, Tenant] = {}
        self._made = 0
        self._device = next(model.parameters()).device

    def create(self, model_id: str, spec: LoraSpec, *, seed: int) -> None:
        """Give the model an adapter that changes nothing yet; its A is drawn by ``seed``.

        Raises:
            TrainerError: there is one of this id, or the model has none of its matrices.
        """
        if model_id in self._tenants:
            raise TrainerError(f"{model_id} is there already")
        name, self._made = f"tenant{self._made}", self._made + 1
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            add_adapter(self._model, spec, name=name)
        own = {
            PREFIX + key.replace(f".{name}.", "."): parameter
            for key, parameter in self._model.named_parameters()
            if f".{name}." in key
        }
        self._tenants[model_id] = Tenant(name, own, torch.optim.AdamW(own.values()))

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[Mapping[str, Any]],
        loss: str,
        *,
        settings: Mapping[str, float],
        backward: bool,
    ) -> tuple[list[Tensor], float]:
        """Return each datum's log-probabilities, in nats, and the sum of the loss; with
        ``backward`` its gradients are added to the adapter's: all of them, or none if it fails.

        Raises:
            TrainerError: there is no such adapter or loss, a datum lacks what it needs, or has a
                token that the model has not.
        """
        self._activate(model_id)
        function, needs = loss_named(loss)
        parsed = [TenantDatum.parse(one, needs) for one in data]
        for one in parsed:
            one.check_tokens(*self._vocabulary)
        found: list[Tensor] = [torch.empty(0)] * len(parsed)
        total = 0.0
        changed = list(self._tenant(model_id).parameters.values()) if backward else []
        with _all_or_none(changed), torch.set_grad_enabled(backward):
            for places in passes(parsed, self._pass_tokens):
                some = [parsed[place].on(self._device) for place in places]
                logprobs = self._logprobs(some)
                terms = zip(logprobs, some, strict=True)
                lost = torch.cat(
                    [function(p, d.inputs, {**DEFAULTS, **settings}) for p, d in terms]
                )
                if backward:
                    lost.sum().backward()
                total += float(lost.detach().double().sum())
                for place, one in zip(places, logprobs, strict=True):
                    found[place] = one.detach().cpu()
        return found, total

    def _logprobs(self, data: Sequence[TenantDatum]) -> list[Tensor]:
        # What stands right of a token is not seen by it, so padding needs no mask.
        rows = nn.utils.rnn.pad_sequence([one.tokens for one in data], batch_first=True)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self._model(input_ids=rows, use_cache=False).logits
        lengths = [len(one.tokens) for one in data]
        kept = torch.cat([row[:length] for row, length in zip(logits, lengths, strict=True)])
        targets = torch.cat([one.targets for one in data])
        return list(token_logprobs(kept, targets, temperature=1.0).logprobs.split(lengths))

    def step(self, model_id: str, settings: Mapping[str, float]) -> float:
        """Take a step of AdamW with the gradients there are, and return their norm before clipping.

        Raises:
            TrainerError: there is no such adapter, or the norm is not finite: the gradients are
                gone then, and the weights are what they were.
        """
        tenant = self._tenant(model_id)
        parameters = list(tenant.parameters.values())
        limit = settings["grad_clip_norm"] or float("inf")
        norm = nn.utils.clip_grad_norm_(parameters, limit)
        if not torch.isfinite(norm):
            tenant.optimizer.zero_grad(set_to_none=True)
            raise TrainerError(
                f"the gradient is not finite (its norm is {float(norm)}): no step was taken, and "
                "the gradients are gone",
                hint="look for infinite advantages or logprobs in the data",
            )
        for group in tenant.optimizer.param_groups:
            group["lr"] = settings["learning_rate"]
            group["betas"] = (settings["beta1"], settings["beta2"])
            group["eps"] = settings["eps"]
            group["weight_decay"] = settings["weight_decay"]
        tenant.optimizer.step()
        tenant.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def save(self, model_id: str, *, optimizer: bool) -> bytes:
        """Return the adapter as a safetensors file, with its optimizer's moments if asked for.

        Raises:
            TrainerError: there is no such adapter.
        """
        tenant = self._tenant(model_id)
        tensors = {name: one.detach() for name, one in tenant.parameters.items()}
        if optimizer:
            for name, parameter in tenant.parameters.items():
                moments = tenant.optimizer.state.get(parameter, {})
                tensors |= {f"{STATE}{key}.{name}": value for key, value in moments.items()}
        whole = {name: one.cpu().contiguous() for name, one in tensors.items()}
        return bytes(safetensors.torch.save(whole))

    def load(self, model_id: str, saved: bytes, *, optimizer: bool) -> None:
        """Take over an adapter that ``save`` has returned, with its optimizer or a new one.

        Raises:
            TrainerError: there is no such adapter, it has other matrices or another rank, or what
                was saved is damaged.
        """
        tenant = self._tenant(model_id)
        try:
            tensors = safetensors.torch.load(saved)
        except safetensors.SafetensorError as error:
            raise TrainerError(f"what was saved cannot be read: {error}") from error
        for name, parameter in tenant.parameters.items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise TrainerError(f"what was saved has no {name} of shape {[*parameter.shape]}")
        more = [
            one for one in tensors if one not in tenant.parameters and not one.startswith(STATE)
        ]
        if more:
            raise TrainerError(
                f"what was saved has {more[0]}, which this adapter has not: it would be lost"
            )
        tenant.optimizer = torch.optim.AdamW(tenant.parameters.values())
        with torch.no_grad():
            for name, parameter in tenant.parameters.items():
                parameter.copy_(tensors[name])
                parameter.grad = None
                moments = {
                    key.removeprefix(STATE).partition(".")[0]: value
                    for key, value in tensors.items()
                    if key.startswith(STATE) and key.partition(".")[2].partition(".")[2] == name
                }
                if optimizer and moments:
                    tenant.optimizer.state[parameter] = {
                        key: value if key == "step" else value.to(parameter.device)
                        for key, value in moments.items()
                    }

    def unload(self, model_id: str) -> None:
        """Remove an adapter; raises TrainerError if there is none."""
        name = self._tenant(model_id).name
        for layer in self._layers():
            layer.delete_adapter(name)
        del self._tenants[model_id]

    def _tenant(self, model_id: str) -> Tenant:
        if model_id not in self._tenants:
            raise TrainerError(f"there is no model {model_id}")
        return self._tenants[model_id]

    def _activate(self, model_id: str) -> None:
        name = self._tenant(model_id).name
        for layer in self._layers():
            layer.set_adapter(name if name in layer.lora_A else [])

    def _layers(self) -> list[Any]:
        from peft.tuners.lora import LoraLayer

        return [module for module in self._model.modules() if isinstance(module, LoraLayer)]
