"""Functions that are tools."""

from __future__ import annotations

from typing import Literal


def weather(place: str, days: int = 3, unit: Literal["celsius", "fahrenheit"] = "celsius"):
    """Forecast the weather.

    Looks it up.

    Args:
        place: City and country,
            such as "Paris, France".
        days: Days to look ahead.
        unit: Scale of the temperatures.

    Returns:
        The forecast: one line a day.
    """
    return {"place": place, "days": days, "unit": unit}


def add(a: float, b: float) -> str:
    """Add two numbers.

    Args:
        a: First number
        b: Second number
    """
    return str(a + b)
