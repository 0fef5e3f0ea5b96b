"""Stop strings in streamed text."""

from __future__ import annotations


class Stops:
    """Finds stop strings in a stream and withholds text that may begin one."""

    def __init__(self, stops: tuple[str, ...]):
        self.stops = stops
        self.withheld = ""
        self.matched: str | None = None
        self._first_letters = {stop[0] for stop in stops}

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
        for at, letter in enumerate(text):
            if letter in self._first_letters:
                end = text[at:]
                if any(stop.startswith(end) for stop in self.stops):
                    self.withheld = end
                    return text[:at]
        self.withheld = ""
        return text

    def finish(self) -> str:
        """End the stream; returns the text that was still withheld."""
        text, self.withheld = self.withheld, ""
        return text
