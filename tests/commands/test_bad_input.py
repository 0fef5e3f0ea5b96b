"""Damage of models, which commands refuse and the doctor finds."""

from __future__ import annotations

import os

from cases.damage import DAMAGE


def replace_by(make, name):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


if hasattr(os, "mkfifo"):
    FILES = (
        "config.json generation_config.json tokenizer.model tokenizer_config.json "
        "chat_template.jinja model.safetensors"
    ).split()
    # Reading a pipe without a writer would wait for ever; the device has no end.
    DAMAGE |= {f"{name} is a pipe": (replace_by(os.mkfifo, name), name) for name in FILES}
    endless = replace_by(lambda path: path.symlink_to("/dev/zero"), FILES[0])
    DAMAGE[f"{FILES[0]} is endless"] = endless, FILES[0]
