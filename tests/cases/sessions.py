"""Conversations: their messages and their consistency."""

from __future__ import annotations


def check_consistency(session):
    """Compare the bookkeeping with the device's record of the tokens."""
    loop, cache = session.loop, session.loop.scheduler.cache
    assert not loop.scheduler.rows.used
    for row, tokens in loop.scheduler.rows.kept.items():
        length = cache.lengths[row]
        assert 0 < length <= len(tokens)
        assert loop.compute(lambda: cache.state(row))["tokens"].tolist() == tokens[:length]


def rendered(llm, session, question):
    system = [{"role": "system", "content": session.system}] if session.system else []
    return llm.encode([*system, *session.messages, {"role": "user", "content": question}])


def roles(messages):
    return [message["role"] for message in messages]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


GOOD = {
    **{"format": "mlx_llama session", "version": 1, "model": "m", "system": None},
    **{"options": {}, "dropped": 0, "messages": TURN},
}
