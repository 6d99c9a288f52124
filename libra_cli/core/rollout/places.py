"""For how many trajectories there is a place to play, and how long that kept others back."""

from __future__ import annotations

from libra_cli.core.types import Seconds


class EpisodePlaces:
    """The places that hosts have for episodes. Without a number there is one for everybody."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._full_since: Seconds | None = None
        self._full_s: Seconds = 0.0

    def allow(self, playing: int, size: int, *, now: Seconds) -> bool:
        """Whether ``size`` more trajectories, which could begin otherwise, have places beside those
        that are ``playing``; one group always has. Until it is asked again the answer stands.
        """
        fits = self.number is None or playing == 0 or playing + size <= self.number
        self._note(full=not fits, now=now)
        return fits

    def nobody_asks(self, *, now: Seconds) -> None:
        """Note that no further group could begin, whatever places there are."""
        self._note(full=False, now=now)

    def take_metrics(self, *, now: Seconds) -> dict[str, float]:
        """Return the seconds since the last call in which places alone kept a group back, as the
        metric ``places_full_s``; nothing where places have no number.
        """
        if self.number is None:
            return {}
        self._note(full=self._full_since is not None, now=now)
        taken, self._full_s = self._full_s, 0.0
        return {"places_full_s": taken}

    def _note(self, *, full: bool, now: Seconds) -> None:
        if self._full_since is not None:
            self._full_s += now - self._full_since
        self._full_since = now if full else None
