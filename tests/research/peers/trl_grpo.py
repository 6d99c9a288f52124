"""TRL's GRPOTrainer with its own tool loop, on the environment ``pointer-chase``.

    python -m tests.research.peers.trl_grpo ORDER

``ORDER`` is a JSON object: ``model_dir``, ``steps``, ``seed``, ``latency_s``, ``groups``,
``group_size``, ``max_turns``, ``max_turn_tokens``, ``max_len`` (tokens of a trajectory, generated
or not), ``learning_rate``, ``betas`` and ``out``, a file that gets a line of JSON after each step:
``at`` (seconds since the epoch) and ``reward`` (mean of the batch).

It is the loop of TRL's documentation: ``environment_factory`` for the tools, generation by
transformers, since vLLM inside TRL's process goes on with old weights where it computes with packed
copies of them, as it does on CPUs. Loss, groups, clipping and learning rate are libra's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from libra_cli.envs.pointer_chase import PointerChase
from libra_cli.envs.protocol import ToolCall, ToolFailed

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if not loop.first and (message.role != "tool" or loop.previtem.role != "tool") %}{{ "\\n" }}
{%- endif %}
{%- if message.role == "tool" %}
{%- if loop.previtem.role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or loop.nextitem.role != "tool" %}{{ "<|im_end|>" }}{% endif %}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + "}\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "\\n<|im_start|>assistant\\n" }}{% endif %}"""
"""The built model's own template, which gets calls as text, for calls that TRL has parsed; newlines
stand before a message, so that one that ends the text is a prefix of what goes on after it."""


class ChaseTools:
    """One episode, in the form TRL asks for: public methods are the tools."""

    _episodes = 0

    def __init__(self, latency_s: float) -> None:
        self._environment = PointerChase(latency_s=latency_s)

    def reset(self, index: int, seed: int, **_: Any) -> None:
        """Begin the task of that number."""
        ChaseTools._episodes += 1
        self._environment.reset(self._environment.task(index, seed), ChaseTools._episodes)

    def get(self, key: str) -> str:
        """Return the key that is stored under a key.

        Args:
            key: The key.
        """
        try:
            return self._environment.look_up(ToolCall("get", {"key": key}))
        except ToolFailed as failure:
            return str(failure)

    def _score(self, answer: str) -> float:
        return self._environment.score(answer)


def success(completions: Any, environments: list[ChaseTools], **_: Any) -> list[float]:
    """Score each trajectory's last turn, which is 0 where that is no answer."""
    rewards = []
    for turns, environment in zip(completions, environments, strict=True):
        last = turns[-1]
        answered = last["role"] == "assistant" and not last.get("tool_calls")
        rewards.append(environment._score(last["content"]) if answered else 0.0)
    return rewards


class _Steps(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Writes down when each step ended."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """TRL logs after every step."""
        if "reward" in logs:
            with self._out.open("a", encoding="utf-8") as file:
                print(json.dumps({"at": time.time(), "reward": logs["reward"]}), file=file)


def main() -> None:
    """Train as the order says."""
    order = json.loads(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(order["model_dir"])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template
    groups, size = int(order["groups"]), int(order["group_size"])
    trainer = GRPOTrainer(
        model=order["model_dir"],
        reward_funcs=success,
        args=GRPOConfig(
            output_dir=str(Path(order["out"]).parent / "trl"),
            seed=order["seed"],
            max_steps=order["steps"],
            num_generations=size,
            per_device_train_batch_size=groups * size,
            max_completion_length=order["max_len"],
            max_tool_calling_iterations=order["max_turns"] - 1,
            generation_kwargs={"max_new_tokens": order["max_turn_tokens"]},
            learning_rate=order["learning_rate"],
            adam_beta1=order["betas"][0],
            adam_beta2=order["betas"][1],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            scale_rewards="none",
            shuffle_dataset=False,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=_tasks(order["seed"], groups * order["steps"]),
        processing_class=tokenizer,
        environment_factory=lambda: ChaseTools(order["latency_s"]),
        callbacks=[_Steps(Path(order["out"]))],
    )
    trainer.train()


def _tasks(seed: int, count: int) -> Dataset:
    chase = PointerChase()
    rows = []
    for index in range(count):
        prompt = chase.reset(chase.task(index, seed), 0)
        rows.append({"prompt": prompt, "index": index, "seed": seed})
    return Dataset.from_list(rows)


if __name__ == "__main__":
    main()
