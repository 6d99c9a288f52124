"""Where ``libra bench --calibrate`` writes, and what it makes of made-up measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_cli.bench.calibration import profile as calibration
from libra_cli.bench.calibration.harness import SyncTiming
from libra_cli.bench.calibration.survey import CalibrationMeasurement, ShapeMeasured
from libra_cli.config.errors import InputError
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.loads import server_loads, training_batches
from libra_cli.runtime.rollout.connection import ServerFacts
from tests.world import recipe

HOST = {"cpus": 8, "mem_total": 64 << 30, "gpus": [{"name": "H100", "mem_total": 80 << 30}] * 8}
MODEL = {
    "num_attention_heads": 4,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}


def measured(settings: Recipe) -> CalibrationMeasurement:
    """What a survey would find on these hosts, with the same price for everything."""
    turns = [
        (load, 1e-3 * sum(load.amounts(2048))) for load in server_loads(16, 1024, kv_tokens=100_000)
    ]
    batches = [(batch, 1e-6 * sum(batch.amounts())) for batch in training_batches(32, 1024)]
    shape = ShapeMeasured(1, ServerFacts("0.30", 100_000, ""), 1, 20.0, tuple(turns))
    return CalibrationMeasurement(
        settings,
        (shape,),
        tuple(batches),
        ranks=1,
        syncs=(SyncTiming(1.0, 0.1),),
        sharing=(),
        trainer_start_s=10.0,
        stop_s=1.0,
        hosts={node.name: dict(HOST) for node in settings.nodes},
        model=dict(MODEL),
        model_bytes=1 << 20,
        chunk_tokens=2048,
        at=0.0,
    )


@pytest.fixture
def a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that is calibrated without a host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "measure", lambda read, *rest, note: measured(read))
    path = Path("recipe.yaml")
    path.write_text("nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\n")
    return path


@pytest.mark.parametrize("place", ["taken", "taken/recipe.yaml/x.json"])
def test_a_place_that_takes_no_profile_is_refused_before_anything_is_measured(
    a_file: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def never(*asked: object, **more: object) -> CalibrationMeasurement:
        raise AssertionError("it was measured")

    monkeypatch.setattr(calibration, "measure", never)
    Path("taken").mkdir()
    Path("taken/recipe.yaml").touch()
    with pytest.raises(InputError, match="taken") as told:
        calibration.calibrate(a_file, Path(place), progress=lambda line: None)
    assert told.value.hint == "libra bench --calibrate recipe.yaml --out profile.json"


@pytest.mark.parametrize("place", [None, "new/mine.json"])
def test_a_profile_is_written_where_it_is_asked_for(a_file: Path, place: str | None) -> None:
    wanted = Path(place) if place else None
    profile, path = calibration.calibrate(a_file, wanted, progress=lambda line: None)
    assert path == (wanted or Path(f"{profile.name}.json"))
    assert path.read_text() == profile.to_json()


@pytest.mark.parametrize(
    ("nodes", "gpus"),
    [
        ([{"host": "a", "gpus": 8, "slots": 2}], 8),
        ([{"host": "a", "gpus": 8}, {"host": "b", "gpus": 4}], 8),
        ([{"host": "a", "gpus": 1, "share": {"rollout": 0.3, "train": 0.6}}], 1),
        ([{"host": "a", "slots": 3}], 3),
    ],
)
def test_a_collective_is_inside_of_a_host_by_its_gpus(
    nodes: list[dict[str, object]], gpus: int
) -> None:
    found = calibration.profile_of(measured(recipe(nodes=nodes)))
    assert found.training.node_gpus == gpus
