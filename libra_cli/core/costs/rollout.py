"""How long equal servers need for a step's trajectories: one law for any number of servers.

A server's time goes into the *work* of its trajectories, the same in whatever batches it is done,
and into the steps of its engine: whatever its batch, one costs ``a``. With W the work of an
optimizer step and T the time that one takes, (1 - W / T) / a engine steps are made a second. So a
trajectory whose own engine steps take P alone and whose tools take Z is in play for
P / (1 - W / T) + Z: work delays it while it decodes, not while it waits for a tool. T follows from
that twice, by the same equation::

    F T = P / (1 - W / T) + Z    so    T(W, P, Z, F) = (u + sqrt(u^2 - 4 W Z / F)) / 2
                                       with u = W + (P + Z) / F

    seats      F = n                  P, Z of all, summed       Little's law for n in play
    longest    F = in_flight + late   P, Z of the longest       a batch waits for it

and is the larger, at least W and an engine step for each chunk of prompts. Without tools T is
W + P / F, and with nothing but tools Z / F. ``n`` is the least of a server's seats, the mean
contexts that the share of its KV cache meant for trajectories in play holds (both less half a
group, for groups begin whole), and its part of ``open`` steps' trajectories, as far as these play:
a group keeps its places until its last members have ended (``Workload.holders``), so of members
with times t in play only the share E[t] / E[the longest t] does at any time.

**In flight.** Of the ``overlap`` = 1 + bound steps' worth that the staleness rule admits, one is in
training for the share of a step that training takes: F = overlap - t / T. So a longer training step
leaves the same batch less time to be played in, and where a batch waits for its longest trajectory
the halves do not overlap by much: T = (t + longest) / overlap. T and F follow from each other, a
half of the way each round. At a bound of 0 they take turns, F is 1, and T is rollout's turn alone.

**Experts.** A step of a mixture takes the longer the more experts its batch chooses. P is then of
steps that read all of them, times the share that those of the batch take (``step_share``), which
follows from T as the rest does.

**Computed again.** New weights empty the KV caches once a step, unless they are kept. By Little's
law ``live`` trajectories are in play, with ``context`` tokens each. Those with a turn on a server
compute these at once, for the share of its time in play that a trajectory is there, and find them
at the next turn. Those that wait for a tool do at the first turn after: ``boundaries`` are the
contexts at all turns but the first ones, and boundaries (1 - exp(-waiting / boundaries)) of these
tokens meet new weights. Not where each batch waits for the one before. Of g siblings with one
prompt on k servers, k (1 - (1 - 1 / k)^g) compute it.

**All at once.** What is computed again, and the prompts of the groups that a step makes room for,
come with the new weights: a burst of R of the work W, which finds more in play than there are on
average. Trajectories end as atoms decay, n of them begin with the version, and N are in play on
average, so r = n / (exp(n / N) - 1) are left before it and r + n - N more than N after. Each of
these more waits for the burst beyond what work delays it in the mean: (r + n - N) R / (1 - R / T)
seconds a step, and no longer than the step, which are added to Z. It is what is left that computes
again. Where seats or cache bind groups begin one after the other, and nothing is added. Without
any fit, steps of 21 static plans simulated since were 4 % off in the root mean square, and 11 %
with everything even (tau2bench and taubench, 24 GPUs, one to eight a server, bounds 1 and 2, cut,
hold and token).

Limit: means. How evenly a scheduler fills its servers, what its moves compute again, and bursts of
trajectories that end together are not in here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.types import Seconds
from libra_cli.core.workload import Workload

ROUNDS = 8
"""Rounds of finding what is computed again and what is in flight, which depend on the time that
they change; each halves the distance.
"""
TRAINING_SHARE = 0.75
"""Share of a step that training takes, before the first round."""


@dataclass(frozen=True, slots=True)
class RolloutLoad:
    """The load of some trajectories of a step on servers of one shape: numbers, or equal arrays.

    ``playing`` is the share of open groups' members that play. Sums: ``count`` trajectories;
    ``work_s`` without prompts, and ``prompt_s`` if each computes its own (of one server: with
    them, and theirs); ``engine_s`` and
    ``tool_s``, P and Z of the module; ``engine_context`` and ``tool_context``, these times mean
    contexts; ``boundaries``, mean contexts at all turns but the first; ``chunks_s``, an engine step
    for each chunk of prompts. Of one trajectory, the longest to be expected: ``longest_work_s``,
    ``longest_engine_s`` and ``longest_tool_s``.
    """

    count: Any
    playing: Any
    work_s: Any
    prompt_s: Any
    engine_s: Any
    tool_s: Any
    engine_context: Any
    tool_context: Any
    boundaries: Any
    chunks_s: Any
    longest_work_s: Any
    longest_engine_s: Any
    longest_tool_s: Any

    def at(self, where: Any) -> RolloutLoad:
        """The load of some elements of its arrays."""
        return RolloutLoad(*(getattr(self, field.name)[where] for field in fields(self)))

    def with_steps(self, share: Any) -> RolloutLoad:
        """The same where an engine step takes this share of what it took."""
        return replace(
            self,
            engine_s=share * self.engine_s,
            engine_context=share * self.engine_context,
            chunks_s=share * self.chunks_s,
            longest_engine_s=share * self.longest_engine_s,
        )

    def begun(self, workload: Workload) -> Any:
        """Return the trajectories that begin with a version, of a step's: what takes the places of
        filtered groups comes after them, and where the halves take turns nobody plays before."""
        at_once = workload.extras.at_once / workload.extras.played
        return self.count * at_once * (not workload.takes_turns)

    def opened(self, workload: Workload, flight: Any, held_s: Any) -> Any:
        """Trajectories that the staleness rule lets play, of those of so many steps in flight.

        Of a group's places the share is taken for which its members play, each ``held_s`` (seconds
        summed over a step's) longer than by itself.
        """
        alone_s = self.engine_s + self.tool_s
        playing = (alone_s + held_s) / np.maximum(alone_s / self.playing + held_s, 1e-9)
        at_once = self.count * workload.extras.at_once / workload.extras.played
        return np.maximum(workload.open(flight) * playing * at_once, 1e-9)

    def of_one(self, servers: Any, group_size: int) -> RolloutLoad:
        """The most that one of so many equal servers gets, each prompt computed once on it."""
        share = np.minimum(1.0, np.ceil(self.count / servers - 1e-9) / self.count)
        own = servers * (1 - (1 - 1 / servers) ** group_size) / group_size
        return replace(
            self,
            count=share * self.count,
            work_s=share * (self.work_s + own * self.prompt_s),
            prompt_s=share * own * self.prompt_s,
            engine_s=share * self.engine_s,
            tool_s=share * self.tool_s,
            engine_context=share * self.engine_context,
            tool_context=share * self.tool_context,
            boundaries=share * self.boundaries,
            chunks_s=share * self.chunks_s,
        )


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """Seconds of a step, each what they follow from; their largest is how long it takes.

    ``places`` are the trajectories that one server has in play, where nothing else holds it back.
    """

    work_s: Any
    seats_s: Any
    longest_s: Any
    chunks_s: Any
    places: Any

    @property
    def seconds(self) -> Any:
        held = np.maximum(self.seats_s, self.longest_s)
        return np.maximum(held, self.work_s + self.chunks_s)


@dataclass(frozen=True, slots=True)
class EqualServers:
    """``number`` servers of these costs with so many ``seats`` each, or an array of such numbers.

    ``play_share`` is the share of a KV cache that trajectories in play may be expected to fill,
    ``train_s`` how long training takes of each step, for each of the numbers.
    """

    cost: ServerLaw
    number: Any
    seats: int
    play_share: float
    train_s: Any = 0.0

    def time(self, load: RolloutLoad, workload: Workload) -> RolloutTime:
        """Return the time of a step of this load, by the equations of the module."""
        return self._time(load.of_one(self.number, workload.group_size), workload, None)

    def in_play_s(self, load: RolloutLoad, workload: Workload, playing: float) -> Seconds:
        """Seconds that the trajectories of a step are in play, summed, with so many at a time."""
        mine = load.of_one(self.number, workload.group_size)
        return playing * float(self._time(mine, workload, playing / self.number).seats_s)

    def _time(self, mine: RolloutLoad, workload: Workload, playing: float | None) -> RolloutTime:
        """Return the time with ``playing`` trajectories on a
        server; None: as many as there may be.
        """
        slower, again, held_s = 1.0, 0.0, 0.0
        training = TRAINING_SHARE * np.sign(self.train_s)
        whole, share = mine, 1.0
        time = self._step(mine, workload, mine.work_s, 1.0, workload.in_flight(training), held_s)
        for _ in range(ROUNDS):
            mine = whole.with_steps(share)
            in_play_s = np.maximum(slower * mine.engine_s + mine.tool_s, 1e-9)
            context = (slower * mine.engine_context + mine.tool_context) / in_play_s
            context = np.maximum(context, 1.0)
            flight = workload.in_flight(training)
            room, opened = self._room(workload, context), mine.opened(workload, flight, held_s)
            places = np.minimum(room, opened) if playing is None else playing
            again_s = self.cost.recompute_s(again, context)
            work_s = mine.work_s + again_s
            time = self._step(mine, workload, work_s, places, flight, held_s)
            seconds = np.maximum(time.seconds if playing is None else time.seats_s, 1e-9)
            slower = 1 / np.maximum(1 - work_s / seconds, 1e-9)
            live = np.minimum(places, (in_play_s + held_s) / seconds)
            decoding = live * slower * mine.engine_s / (in_play_s + held_s)
            share = (share + self.cost.step_share(decoding)) / 2
            begun = np.clip(room - opened + mine.begun(workload) / 2, 0.0, mine.begun(workload))
            left = _left(live, begun)
            burst_s = again_s + mine.prompt_s
            busy = burst_s / seconds
            held_s = (held_s + (left + begun - live) * burst_s / np.maximum(1 - busy, busy)) / 2
            at_once = left * slower * mine.engine_context / in_play_s
            later = _met(left * mine.tool_context / in_play_s, mine.boundaries)
            again = (again + at_once + later) / 2
            again *= not (workload.takes_turns or workload.keeps_kv)
            training = (training + self.train_s / np.maximum(seconds, self.train_s)) / 2
        return time

    def _step(
        self,
        mine: RolloutLoad,
        workload: Workload,
        work_s: Any,
        places: Any,
        flight: Any,
        held_s: Any,
    ) -> RolloutTime:
        longest_work_s = np.maximum(work_s, mine.longest_work_s / flight)
        return RolloutTime(
            work_s=work_s,
            seats_s=_step_s(work_s, mine.engine_s, mine.tool_s + held_s, places),
            longest_s=_step_s(
                longest_work_s,
                mine.longest_engine_s,
                mine.longest_tool_s + held_s / np.maximum(mine.count, 1e-9),
                flight + workload.late,
            ),
            chunks_s=mine.chunks_s,
            places=places,
        )

    def _room(self, workload: Workload, context: Any) -> Any:
        """Trajectories that the seats and the KV cache of one server have room for."""
        fitting = self.play_share * self.cost.kv_tokens / context
        opened = (workload.group_size - 1) / 2 / self.number
        return np.maximum(np.minimum(self.seats, fitting) - opened, 1.0)


def _step_s(work_s: Any, engine_s: Any, tool_s: Any, steps: Any) -> Any:
    """Return T(W, P, Z, F) of the module, in seconds."""
    waits = tool_s / steps
    total = work_s + engine_s / steps + waits
    return (total + np.sqrt(np.maximum(total * total - 4 * work_s * waits, 0.0))) / 2


def _left(live: Any, begun: Any) -> Any:
    """Return r of the module: who still plays when so many begin, of ``live`` on average."""
    ratio = begun / np.maximum(live, 1e-9)
    return np.where(ratio > 1e-6, begun / np.expm1(np.clip(ratio, 1e-6, 500.0)), live)


def _met(tokens: Any, boundaries: Any) -> Any:
    """Tokens computed again: of those live at new weights, what has another turn to come."""
    most = np.maximum(boundaries, 1e-9)
    return most * -np.expm1(-tokens / most)
