"""Slots: numbers of running requests and of the conversations that they continue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases.engine import make, make_prompts, request

from mlx_llama.server.slots import NO_SLOT, Slots, Task

ONE, TWO, THREE = [1] * 20, [2] * 20, [3] * 20


def test_a_conversation_keeps_its_slot_and_a_new_one_takes_the_oldest():
    slots = Slots(3)
    assert [slots.enter(text) for text in (ONE, TWO)] == [0, 1]
    assert slots.enter([*ONE, 5]) == 0 and slots.texts[0] == [*ONE, 5]
    assert slots.enter(THREE) == 2  # never used
    assert slots.enter([4] * 20) == 1  # unused for longest
    slots.tasks[2] = Task(slots, request(THREE))
    assert slots.enter([*THREE, 6]) == 0  # its own is taken
    slots.tasks.clear()
    assert slots.enter([4] * 7 + [9] * 9) == 2  # seven common tokens are none
    assert slots.enter([4] * 8 + [9] * 9) == 1


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_running_requests_have_slots_of_their_own(runs_ahead):
    backend, loop = make(runs_ahead, max_rows=3, memory=1_100_000, eos=())  # some are set aside
    slots = Slots(3)
    tasks = [
        Task(slots, request(prompt, max_tokens=400))
        for prompt in make_prompts(6, seed=4, longest=100)
    ]
    for task in tasks:
        task.answer = loop.submit(replace(task.request, on_admit=task.admit))
    assert {task.slot for task in tasks} == {NO_SLOT}
    while not all(task.answer.done for task in tasks):
        loop.tick()
        running = [task for task in tasks if task.slot != NO_SLOT and task.is_running]
        assert slots.running == {task.slot: task for task in running}
        assert len(slots.running) == len(running) and slots.running.keys() <= {0, 1, 2}
        for sequence in loop.scheduler.admitted:
            assert sum(text is sequence.tokens for text in slots.texts) == 1
    assert loop.preemptions and {task.slot for task in tasks} == {0, 1, 2}
