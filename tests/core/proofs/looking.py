"""Reading a diagnosis."""

from __future__ import annotations


def found(diagnosis, level):
    """Messages of a level."""
    return [one.message for one in diagnosis.findings if one.level == level]


def fit(diagnosis, name):
    """The fit on a backend."""
    [one] = [one for one in diagnosis.fits if one.backend == name]
    return one
