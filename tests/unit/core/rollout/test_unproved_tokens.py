"""A reply with tokens of a version that its server has yet to prove waits for the proof."""

from __future__ import annotations

from array import array

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.rollout.active import ActiveTrajectory, Stage
from libra_cli.core.types import VersionSpan, WeightVersion
from tests.elastic import Scene, of, scene

SLOT = "b/0"
WORDS = array("i", [11, 12])


class Unproved:
    """In the middle of a turn b/0 has loaded a version that all but it have proved."""

    def __init__(self) -> None:
        self.world: Scene = scene()
        self.server = self.world.machine.servers.replicas[SLOT]
        self.world.silent = of(e.ServerSynced, SLOT)
        self.world.until(lambda: self._proofs() and self._proved_by_others())
        asked_before = self.world.did(a.Generate)[-1].request
        self.world.silent = of((e.TurnGenerated, e.TurnFailed, e.ServerSynced), SLOT)
        self.world.until(lambda: any(one.request > asked_before for one in self._inside()))
        assert self.server.verified is not None
        assert self.server.syncing is not None
        self.old = self.server.verified.version
        self.new = self.server.syncing.version
        self.flight = next(one for one in self._inside() if one.request > asked_before)
        self.asked = next(
            asked for asked in self.world.did(a.Generate) if asked.request == self.flight.request
        )
        self.before = self.flight.trajectory.token_ids[:]

    def _proofs(self) -> list[e.ServerSynced]:
        return [event for event in self.world.kept if isinstance(event, e.ServerSynced)]

    def _proved_by_others(self) -> bool:
        others = (self.world.machine.servers.replicas[slot].verified for slot in ("a/1", "b/1"))
        (proof,) = self._proofs()
        return all(one is not None and one.version >= proof.published.version for one in others)

    def _inside(self) -> list[ActiveTrajectory]:
        flights = self.world.machine.rollout.active.values()
        return [one for one in flights if one.stage is Stage.GENERATING and one.slot == SLOT]

    def reply(self, newest: WeightVersion) -> None:
        """Its second token is of this version."""
        spans = (VersionSpan(self.old.step, 0, 1), VersionSpan(newest.step, 1, 2))
        self.world.give(
            e.TurnGenerated(
                request=self.asked.request,
                trajectory=self.asked.trajectory,
                slot=SLOT,
                incarnation=self.asked.incarnation,
                prompt_ids=self.asked.prompt_ids,
                token_ids=WORDS,
                logprobs=array("f", [-1.0, -1.0]),
                spans=spans,
                newest=newest,
                cache_key=self.asked.cache_key,
                finish_reason="stop",
                started_at=self.world.now,
            )
        )

    def prove(self) -> None:
        """The proof comes."""
        for proof in self._proofs():
            self.world.give(proof)

    @property
    def advanced(self) -> bool:
        """Whether the environment was given the turn."""
        asked = self.world.did(a.AdvanceEpisode)
        return any(
            one.trajectory == self.asked.trajectory and one.token_ids == WORDS for one in asked
        )


def test_tokens_of_the_proved_version_are_used_at_once():
    turn = Unproved()
    turn.reply(turn.old)
    assert turn.flight.trajectory.token_ids == turn.before + WORDS
    assert turn.advanced


def test_tokens_of_another_version_are_used_when_this_very_server_has_proved_it():
    turn = Unproved()
    turn.reply(turn.new)
    assert turn.flight.trajectory.token_ids == turn.before
    assert not turn.advanced
    turn.prove()
    assert turn.flight.trajectory.token_ids == turn.before + WORDS
    assert turn.advanced


def test_tokens_whose_proof_fails_are_thrown_away_and_the_turn_is_asked_for_again():
    turn = Unproved()
    turn.reply(turn.new)
    assert turn.server.syncing is not None
    turn.world.give(
        e.SyncFailed(SLOT, turn.asked.incarnation, turn.server.syncing, "wrong", True, 3.0)
    )
    turn.world.silent = lambda event: False
    again = [turn.asked]

    def asked_again() -> bool:
        again[:] = [
            one for one in turn.world.did(a.Generate) if one.trajectory == turn.asked.trajectory
        ]
        return again[-1].request > turn.asked.request

    turn.world.until(asked_again)
    assert again[-1].prompt_ids == turn.asked.prompt_ids
    assert again[-1].slot != SLOT
    assert not turn.advanced
