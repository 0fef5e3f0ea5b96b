"""The data of the guide's training.

Its texts are in one compressed file. To edit them, unpack it; a file of the folder comes first:

    python -m zipfile -e examples/training/texts.zip examples/training/texts
    cd examples/training/texts && python -m zipfile -c ../texts.zip guide_data evaluation
"""

import zipfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]


@cache
def read_text(name: str) -> str:
    """A text of the training, such as guide_data/concepts.txt."""
    unpacked = FOLDER / "texts" / name
    if unpacked.exists():
        return unpacked.read_text(encoding="utf-8")
    with zipfile.ZipFile(FOLDER / "texts.zip") as texts:
        return texts.read(name).decode()


def read_lines(name: str) -> list[str]:
    """The lines of a text that are not empty."""
    return [line for line in read_text(name).splitlines() if line.strip()]
