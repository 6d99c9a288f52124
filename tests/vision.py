"""A tiny random model of the Qwen3-VL kind, and an environment that shows it coloured squares."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra_cli.envs.png import png_of
from libra_cli.envs.protocol import Message, Reply, Task, ToolCall, ToolSchema

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IMAGE, VIDEO, START, END = 5, 6, 3, 4
SIZES = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
TEMPLATE = """\
{%- macro said(content) %}
{%- if content is string %}{{- content }}
{%- else %}{%- for part in content %}
{%- if part.type == "image" %}{{- "<|vision_start|><|image_pad|><|vision_end|>" }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{%- endmacro %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- "<|im_start|>user\\n<tool_response>\\n" }}{{- said(message.content) }}
{{- "\\n</tool_response><|im_end|>\\n" }}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" }}{{- said(message.content) }}{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""
"""Qwen3-VL's form of it, without schemas of tools and without calls."""
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


class Squares:
    """Shows a coloured square, and after each answer another, of another size, twice in all."""

    tools: Sequence[ToolSchema] = ()

    def task(self, index: int, seed: int) -> Task:
        return {"colours": [list(COLOURS)[(index + seed + turn) % 3] for turn in range(2)]}

    def reset(self, task: Task, seed: int) -> list[Message]:
        self.left, self.right = list(task["colours"]), 0
        return [self._shown()]

    def _shown(self) -> Message:
        size = (64, 64) if len(self.left) > 1 else (40, 90)
        square = square_of(COLOURS[self.left[0]], *size)
        return {"role": "user", "content": "Colour?", "images": [square]}

    def step(self, call: ToolCall) -> str:
        return "there are no tools"

    def reply(self, text: str) -> Reply | None:
        self.right += self.left.pop(0)[0] in text
        return Reply([self._shown()]) if self.left else None

    def score(self, answer: str) -> float:
        right = self.right + (self.left[0][0] in answer if self.left else 0)
        return right / 2


class Letters:
    """Shows one coloured square, and rewards its first letter and nothing else."""

    tools: Sequence[ToolSchema] = ()

    def task(self, index: int, seed: int) -> Task:
        return {"colour": list(COLOURS)[(index * 7 + seed) % 3]}

    def reset(self, task: Task, seed: int) -> list[Message]:
        self.colour = str(task["colour"])
        square = square_of(COLOURS[self.colour], 64, 64)
        return [{"role": "user", "content": "Colour?", "images": [square]}]

    def step(self, call: ToolCall) -> str:
        return "there are no tools"

    def score(self, answer: str) -> float:
        return float(answer.strip() == self.colour[0])


def square_of(colour: Sequence[int], height: int, width: int) -> bytes:
    pixels: NDArray[np.uint8] = np.zeros((height, width, 3), np.uint8)
    pixels[height // 4 : height // 2, width // 4 :] = colour
    return png_of(pixels)


def write_model(directory: Path, *, seed: int = 0) -> None:
    """Write a model directory as its publisher would: tokenizer, processors and weights."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    write_processor(directory)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 272,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "patch_size": PATCHES["patch_size"],
            "temporal_patch_size": PATCHES["temporal_patch_size"],
            "spatial_merge_size": PATCHES["merge_size"],
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for one in model.parameters():
            if one.ndim > 1:
                one.normal_(0, 0.08)
            else:
                one.add_(torch.randn_like(one) * 0.05)
    model.save_pretrained(directory)


def teach_letters(directory: Path, *, steps: int = 80) -> None:
    """Teach a model to answer ``Letters`` with one of the letters, drawn without looking."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import Qwen3VLForConditionalGeneration

    from libra_cli.node.model.images import ImageReader, freeze_towers
    from libra_cli.runtime.episodes.renderer import Renderer

    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    freeze_towers(model)
    renderer, reader = Renderer(directory, images=True), ImageReader(directory)
    pngs = [square_of(colour, 64, 64) for colour in COLOURS.values()]
    patches = [reader.read(png) for png in pngs]
    prompt = renderer.prompt([{"role": "user", "content": "Colour?", "images": pngs[:1]}])
    letters = [renderer.encode(name[0])[0] for name in COLOURS]
    optimizer = torch.optim.AdamW(filter(lambda one: one.requires_grad, model.parameters()), 2e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        said, seen = (torch.randint(3, (24,), generator=draw).tolist() for _ in range(2))
        ids = torch.tensor([[*prompt, letters[one], renderer.end_of_turn] for one in said])
        logits = model(
            input_ids=ids,
            mm_token_type_ids=(ids == IMAGE).int(),
            pixel_values=torch.cat([patches[one].values for one in seen]),
            image_grid_thw=torch.stack([patches[one].grid for one in seen]),
        ).logits
        optimizer.zero_grad()
        cross_entropy(logits[:, -3:-1].flatten(0, 1), ids[:, -2:].flatten()).backward()
        optimizer.step()
    model.save_pretrained(directory)


def write_processor(directory: Path) -> None:
    """Write what a prompt is made by: tokenizer, template, and what is done with images."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    written: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": SPECIAL[0],
            "eos_token": SPECIAL[2],
            "clean_up_tokenization_spaces": False,
            "additional_special_tokens": SPECIAL[1:],
            "chat_template": TEMPLATE,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "size": SIZES,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            **PATCHES,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
            "size": SIZES,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            **PATCHES,
        },
    }
    for name, value in written.items():
        (directory / name).write_text(json.dumps(value))


def compare(directory: Path) -> list[dict[str, Any]]:
    """A conversation as token ids, and where its images are: by libra, transformers and vLLM.

    Where there is no torchvision the two get transformers' processor on PIL, and vLLM still writes
    the tokens itself.
    """
    import io

    from PIL import Image

    from libra_cli.node.rollout import torchvision_names
    from libra_cli.runtime.episodes.renderer import Renderer

    sizes = [[(64, 64), (40, 90)], [(64, 64)]]
    shown = [[square_of((255, 0, 0), *size) for size in some] for some in sizes]
    messages: list[Message] = [
        {"role": "user", "content": text, "images": images}
        for text, images in zip(("Colour?", "And?"), shown, strict=True)
    ]
    renderer = Renderer(directory, images=True)
    ours = renderer.prompt(messages)
    places = [[one.start, one.tokens] for one in renderer.images_in(ours, messages)]

    torchvision_names.provide(directory)
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl import Qwen3VLProcessor, Qwen3VLVideoProcessor
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    tokenizer = AutoTokenizer.from_pretrained(directory)
    processor: Any = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(directory),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor.from_pretrained(directory),
        chat_template=tokenizer.chat_template,
    )
    pictures = [Image.open(io.BytesIO(png)).convert("RGB") for some in shown for png in some]
    conversation = [
        {
            "role": "user",
            "content": [
                *({"type": "image"} for _ in message["images"]),
                {"type": "text", "text": message["content"]},
            ],
        }
        for message in messages
    ]
    text = processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    theirs = processor(text=[text], images=pictures)["input_ids"][0]
    config = EngineArgs(
        model=str(directory), dtype="float32", enforce_eager=True, max_model_len=256,
        skip_mm_profiling=True, limit_mm_per_prompt={"video": 0},
    ).create_engine_config()  # fmt: skip
    writer: Any = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    writer.info.get_hf_processor = lambda **_: processor
    made = writer(prompt=text, mm_items=writer.info.parse_mm_data({"image": pictures}))
    found = [[one.offset, one.length] for one in made["mm_placeholders"]["image"]]
    return [
        {"ids": ours, "places": places},
        {"ids": list(theirs)},
        {"ids": list(made["prompt_token_ids"]), "places": found},
    ]


def turns_over_a_load(directory: Path) -> list[list[int]]:
    """Play a turn whose image is in the prefix cache, alone and with all caches dropped in the
    middle, as loading a version does; return the tokens of both."""
    from libra_cli.node.rollout import torchvision_names

    torchvision_names.provide(directory)
    from libra_cli.node.rollout.engine import VllmEngine

    engine = VllmEngine(
        f"--model {directory} --dtype float32 --max-model-len 512 --scheduling-policy priority "
        "--logprobs-mode processed_logprobs --skip-mm-profiling --no-mm-device-do-normalize "
        "--mm-processor-cache-gb 0 --enforce-eager --generation-config vllm "
        "--worker-extension-cls libra_cli.node.rollout.worker.VersionLoader".split()
    )
    png, before = square_of(COLOURS["red"], 64, 64), [7, START]
    prompt = [*before, *[IMAGE] * 4, END, *range(10, 210)]  # more than a block of vLLM's on CPUs
    order = {
        "prompt_ids": prompt, "images": [[len(before), 4, png]], "max_tokens": 40,
        "temperature": 0.0, "top_p": 1.0, "stop_token_ids": [], "to_the_end": True,
        "score_prompt": False, "routes_from": 0, "cache_salt": "v1", "priority": 0,
    }  # fmt: skip
    found = []
    for name in ("first", "interrupted"):
        engine.add(name, order)
        ended: list[Any] = []
        for _ in range(5):
            ended += engine.step()
        if name == "interrupted":
            assert engine.counters()["prefix_hits"] > 4, "the image is not in the cache"
            engine._core.pause_scheduler("keep", clear_cache=True)
            engine._core.resume_scheduler()
        while engine.busy:
            ended += engine.step()
        found.append(array("i", ended[0][1]["token_ids"]).tolist())
    engine.close()
    return found


if __name__ == "__main__":
    play = {"compare": compare, "turns": turns_over_a_load}[sys.argv[1]]
    sys.stdout.write("\n" + json.dumps(play(Path(sys.argv[2]))) + "\n")
