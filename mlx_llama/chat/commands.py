"""The REPL's commands, lines that begin with a slash. They use the session, not the terminal."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_llama import cli
from mlx_llama.api.cache_file import cache_path
from mlx_llama.api.session import Session
from mlx_llama.api.session_file import FORMAT
from mlx_llama.cli.running import spell_flags
from mlx_llama.core.engine.request import Answer
from mlx_llama.core.errors import LlamaError, OptionsError, SessionError
from mlx_llama.core.options import ALIASES, ENDLESS, FIELDS
from mlx_llama.core.text.thoughts import find_thoughts

KEYS = """\
Enter sends; Alt-Enter, or a backslash at the end of a line, begins a new line.
Ctrl-C stops an answer, or clears the line; Ctrl-D leaves.
Tab completes, Up and Ctrl-R search the history.
// sends a text that begins with /."""


class CommandError(LlamaError):
    """An unknown command, or a wrong argument."""


class Leave(Exception):
    """Raised to end the REPL."""


CACHE_FLAG = "--cache"
SHORT = 60  # characters of a message that is quoted in another one


# a message to print, an answer to show, or work for the dialogue, a function of its Chat
Outcome = str | Answer[str] | Callable[[Any], None]


@dataclass(frozen=True)
class Command:
    run: Callable[[Session, str], Outcome]  # takes the session and the text after the name
    argument: str  # as in /help, in brackets if it is optional
    help: str


def run(session: Session, line: str) -> Outcome:
    """Run the command in `line`. Raises LlamaError, with nothing changed, and Leave."""
    name, argument = split(line)
    name = OTHER_NAMES.get(name, name)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = "/help lists them; // begins a text with a slash"
        hint = f"did you mean /{near[0]}?" if near else hint
        raise CommandError(f"there is no command {'/' + name!r:.60} ({hint})")
    command = COMMANDS[name]
    if argument and not command.argument:
        raise CommandError(f"/{name} takes no argument, not {argument!r:.60}")
    if not argument and command.argument and not command.argument.startswith("["):
        raise CommandError(f"/{name} needs an argument: /{name} {command.argument}")
    return command.run(session, argument)


def split(line: str) -> tuple[str, str]:
    """Split a command line into its name, without the slash, and its argument."""
    name, *rest = line.removeprefix("/").split(maxsplit=1) or [""]
    return name, rest[0].strip() if rest else ""


def option_name(text: str) -> str:
    """Name of the option in `text`, which may be its name, an alias or a flag."""
    key = text.lstrip("-").replace("-", "_")
    return ALIASES.get(key, key)


def spell(text: str) -> str:
    """Spell options in a message: generation options as /set takes them, load options as flags."""
    return spell_flags(re.sub(rf"`({'|'.join(FIELDS)})`", r"\1", text))


def option_value(session: Session, name: str) -> str:
    """The current value of an option, in the form that /set takes."""
    options = session.resolve().options
    value = getattr(options, name)
    if name == "seed" and "seed" not in session.options:
        return "random"
    if name == "speculate":
        return session.engine.choose_speculation(options)[0]
    if value is None or (name == "max_tokens" and value == ENDLESS):
        return "none"
    if name == "schema":
        return value.text
    if name in ("stop", "dry_sequence_breakers"):
        escaped = (text.replace("\n", r"\n").replace("\t", r"\t") for text in value)
        return " ".join(map(shlex.quote, escaped))
    if name == "logit_bias":
        return " ".join(f"{token}={bias:g}" for token, bias in value.items())
    if name == "stop_token_ids":
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _help(session: Session, argument: str) -> str:
    usages = {f"/{name} {command.argument}": command.help for name, command in COMMANDS.items()}
    return "\n".join([*(f"  {usage:<23} {help}" for usage, help in usages.items()), "", KEYS])


def _undo(session: Session, argument: str) -> str:
    question = session.undo()[0]["content"]
    count = len(session.messages)
    left = f"{count} messages left" if count else "the conversation is empty"
    return f"(took back {shorten(question)!r} and its answer; {left})"


def _edit(session: Session, argument: str) -> Outcome:
    if argument:
        return session.edit(argument)
    question = session.last_question
    return lambda chat: chat.let_edit(question)


def _model(session: Session, argument: str) -> Outcome:
    if argument:
        return lambda chat: chat.switch(os.path.expanduser(unquote(argument)))
    backend = session.engine.backend
    return f"model: {session.model}, on {backend.name} ({backend.device_name})"


def shorten(text: str) -> str:
    line = text.strip().partition("\n")[0][:SHORT]
    return line if line == text.strip() else line + "..."


def _clear(session: Session, argument: str) -> str:
    session.clear()
    return "(a new conversation" + ("; the system prompt stays)" if session.system else ")")


def _regen(session: Session, argument: str) -> Answer[str]:
    stream = session.regenerate()
    if session.is_repeating:
        stream.completion.notices.append(
            "these options give the same answer again: see /set temperature and /set seed"
        )
    return stream


def _system(session: Session, argument: str) -> str:
    if not argument:
        system = session.system
        return f"system prompt: {system}" if system else "(there is no system prompt)"
    session.system = None if argument == "none" else argument
    return "(no system prompt from here on)" if session.system is None else "(system prompt set)"


def _set(session: Session, argument: str) -> str:
    if not argument:
        origins = session.resolve().origins
        values = {name: option_value(session, name) or "-" for name in FIELDS}
        lines = [f"  {name:<24} {values[name]:<12} {origins[name]}" for name in FIELDS]
        return "\n".join(lines)
    typed, *rest = argument.split(maxsplit=1)
    name = option_name(typed)
    if name not in FIELDS:
        session.resolve(**{name: ""})  # raises, and suggests a name
    unset = ("random", "-1") if name == "seed" else ("none",) if name in NULLABLE else ()
    if rest and rest[0] in ("default", *unset):
        session.options.pop(name, None)
    elif rest:
        chosen = session.resolve(**{name: _parse_value(name, rest[0])})
        session.options[name] = getattr(chosen.options, name)
    origin = session.resolve().origins[name]
    help = "" if rest else f": {FIELDS[name].description}"
    return f"{name} = {option_value(session, name) or '-'} ({origin}){help}"


def _parse_value(name: str, text: str) -> Any:
    if name not in ("stop", "dry_sequence_breakers", "logit_bias"):
        return text
    try:
        words = shlex.split(text)
    except ValueError as error:
        reason = f"is not a list of words: {str(error).lower()}"
        raise OptionsError(f"option `{name}`: {text!r:.60} {reason}") from None
    if name == "logit_bias":
        return words
    return [word.replace(r"\n", "\n").replace(r"\t", "\t") for word in words]


def _save(session: Session, argument: str) -> str:
    cache = argument.endswith(" " + CACHE_FLAG)
    path = file_path(argument.removesuffix(CACHE_FLAG).rstrip() if cache else argument)
    if os.path.lexists(path) and not _is_saved_session(path):
        text = "exists already and is not a saved session: choose another name"
        raise SessionError(f"{path}: {text}")
    session.save(path, cache)
    with_cache = f", their cache to {cache_path(path)}" if cache else ""
    return f"(saved {len(session.messages)} messages to {path}{with_cache})"


def _is_saved_session(path: str) -> bool:
    try:
        content = json.loads(cli.read_text(_require_file(path)))
    except (LlamaError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def _load(session: Session, argument: str) -> Outcome:
    path = _require_file(file_path(argument))
    notices = session.load(path)
    system = ["a system prompt"] if session.system else []
    parts = [_count_messages(session), *system]
    parts += [f"{name} = {option_value(session, name)}" for name in session.options]
    lines = [f"(loaded {', '.join(parts)})", *(f"({spell(notice)})" for notice in notices)]
    if not session.messages:
        return "\n".join(lines)

    def show(chat: Any) -> None:
        chat.say("\n".join(lines))
        if chat.recall:
            chat.recall(session.last_question, session.messages[-1]["content"])

    return show


def _stats(session: Session, argument: str) -> str:
    count = len(session.cached_tokens)
    nbytes = session.loop.scheduler.cache.nbytes_for(count)
    # the summary of an answer lists the notices already
    notes = "".join(f"\nnote: {notice}" for notice in session.engine.model.notices)
    return (
        f"{spell(session.last.summary() if session.last else f'no answer yet{notes}')}\n"
        f"context: {count} of {session.engine.context} tokens cached, {nbytes / 2**20:.2f} MiB\n"
        f"conversation: {_count_messages(session)}"
    )


def _count_messages(session: Session) -> str:
    oldest = len(session.messages) - len(session.seen)
    dropped = f", the oldest {oldest} no longer seen by the model" if oldest else ""
    return f"{len(session.messages)} messages{dropped}"


def _read(session: Session, argument: str) -> Answer[str]:
    path = _require_file(file_path(argument))
    text = cli.read_text(path)
    if not text.strip():
        raise CommandError(f"{path}: is empty")
    return session.stream(text)


def _think(session: Session, argument: str) -> str:
    if find_thoughts(session.template.source) is None:
        raise CommandError(
            f"/think: {session.model} has no thoughts: its chat template has no marks"
        )
    if argument:
        if argument not in ("on", "off"):
            raise CommandError(f"/think needs on or off, not {argument!r:.60}")
        session.options["reasoning"] = argument
    return f"(thoughts: {session.resolve().options.reasoning})"


def _show(session: Session, argument: str) -> str:
    if argument not in ("thoughts", "thought"):
        raise CommandError(f"/show shows thoughts: /show thoughts, not {argument!r:.60}")
    answers = [message for message in session.messages if message["role"] == "assistant"]
    thought = answers[-1].get("reasoning_content") if answers else None
    return thought or "(the last answer has no thought)"


def _exit(session: Session, argument: str) -> Outcome:
    raise Leave


def file_path(text: str) -> str:
    """The absolute path in `text`; removes quotes and expands ~. Raises CommandError."""
    text = unquote(text)
    if not text or "\0" in text:
        raise CommandError(f"{text!r} is not the name of a file")
    return os.path.abspath(os.path.expanduser(text))


def unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _require_file(path: str) -> str:
    # Reading a pipe or a device might never end.
    if os.path.exists(path) and not os.path.isfile(path):
        raise CommandError(f"{path}: is not a file")
    return path


# Options that are off unless they are set. For speculate, "none" is a value.
NULLABLE = {name for name, field in FIELDS.items() if field.default is None} - {"seed", "speculate"}
NULLABLE.add("max_tokens")

COMMANDS = {
    "help": Command(_help, "", "list the commands"),
    "resume": Command(
        lambda session, _: session.resume(), "", "continue an answer that was cut off or stopped"
    ),
    "regen": Command(_regen, "", "answer the last message again"),
    "edit": Command(_edit, "[TEXT]", "edit the last message and answer it again"),
    "undo": Command(_undo, "", "remove the last message and its answer"),
    "clear": Command(_clear, "", "start a new conversation; keep the system prompt and options"),
    "system": Command(_system, "[TEXT]", "show or set the system prompt; none: remove it"),
    "set": Command(_set, "[OPTION [VALUE]]", "show or set an option; the value default resets it"),
    "think": Command(_think, "[on|off]", "turn thoughts on or off, where the model has a switch"),
    "show": Command(_show, "thoughts", "show the last answer's thought"),
    "model": Command(
        _model, "[NAME]", "show the model, or load another one and keep the conversation"
    ),
    "save": Command(
        _save, "FILE [--cache]", "save the conversation; --cache: with its keys and values"
    ),
    "load": Command(
        _load, "FILE", "continue a saved conversation, from its cache if that was saved"
    ),
    "stats": Command(_stats, "", "speed, prefix reuse, evaluations per token; use of the context"),
    "read": Command(_read, "FILE", "send the text of a file as a message"),
    "exit": Command(_exit, "", "leave; also /bye and /quit"),
}
OTHER_NAMES = {"bye": "exit", "quit": "exit", "?": "help", "continue": "resume"}
