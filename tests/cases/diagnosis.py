"""Reading a diagnosis."""

from __future__ import annotations


def messages_of(diagnosis, level):
    """Messages of a level."""
    return [finding.message for finding in diagnosis.findings if finding.level == level]


def fit(diagnosis, name):
    """The fit on a backend."""
    [match] = [entry for entry in diagnosis.fits if entry.backend == name]
    return match
