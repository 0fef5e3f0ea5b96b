"""Stop strings in streamed text."""

from __future__ import annotations


class Stops:
    """Finds stop strings in a stream and withholds text that may begin one."""

    def __init__(self, stops: tuple[str, ...]):
        self.stops = stops
        self.withheld = ""
        self.matched: str | None = None
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        # proper beginnings of stop strings by last character, longest first
        self._beginnings: dict[str, list[str]] = {}
        for beginning in sorted(beginnings, key=len, reverse=True):
            self._beginnings.setdefault(beginning[-1], []).append(beginning)

    def push(self, piece: str) -> str:
        """Append `piece`; returns text that is safe to show, which ends before a stop string."""
        if not self.stops:
            return piece
        text = self.withheld + piece
        matches = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if matches:
            at, self.matched = min(matches)
            self.withheld = ""
            return text[:at]
        keep = next(
            (len(start) for start in self._beginnings.get(text[-1:], ()) if text.endswith(start)), 0
        )
        self.withheld = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """End the stream; returns the text that was still withheld."""
        text, self.withheld = self.withheld, ""
        return text
