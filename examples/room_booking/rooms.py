"""The building: its rooms, when they are taken, the tool that tells the agent, and the grader."""

from __future__ import annotations

from typing import Any, TypedDict

HARD = ("seats", "items", "step_free", "free")
"""What a room must satisfy; `fitting` says how."""


class Room(TypedDict):
    id: str
    seats: int
    items: list[str]
    step_free: bool
    booked: list[str]
    """Starts and ends on the day that was asked for, such as "10:00-11:30"."""


class Task(TypedDict):
    request: str
    date: str
    start: str
    minutes: int
    people: int
    items: list[str]
    step_free: bool
    rooms: list[Room]
    expected: str
    """The smallest room that satisfies everything; there is exactly one."""


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_rooms_and_availability",
        "description": "All rooms with their seats, what is in them, whether they are step-free, and when they are "
        "booked on a date.",
        "parameters": {
            "type": "object",
            "properties": {"date": {"type": "string", "description": "YYYY-MM-DD"}},
            "required": ["date"],
        },
    },
}


def get_rooms_and_availability(task: Task, date: str) -> list[Room]:
    """The rooms on that date; on another day than the task's all of them are free."""
    return task["rooms"] if date == task["date"] else [{**room, "booked": []} for room in task["rooms"]]


def minutes_of(clock: str) -> int:
    hours, minutes = clock.split(":")
    return int(hours) * 60 + int(minutes)


def is_free(room: Room, start: str, minutes: int) -> bool:
    """Whether no booking overlaps the meeting."""
    begin = minutes_of(start)
    spans = [booking.split("-") for booking in room["booked"]]
    return all(minutes_of(end) <= begin or minutes_of(first) >= begin + minutes for first, end in spans)


def fitting(room: Room, task: Task) -> dict[str, bool]:
    """Which of the hard requirements a room satisfies."""
    return {
        "seats": room["seats"] >= task["people"],
        "items": set(task["items"]) <= set(room["items"]),
        "step_free": room["step_free"] or not task["step_free"],
        "free": is_free(room, task["start"], task["minutes"]),
    }


def grade(answer: str, task: Task) -> float:
    """1 for the expected room; 0.6 for another that satisfies everything; for the rest at most 0.3, by how much of it
    they satisfy; 0 for no room at all. The room that the answer names last counts.
    """
    named = [(answer.rfind(room["id"]), room) for room in task["rooms"] if room["id"] in answer]
    if not named:
        return 0.0
    room = max(named, key=lambda pair: pair[0])[1]
    if room["id"] == task["expected"]:
        return 1.0
    met = sum(fitting(room, task).values())
    return 0.6 if met == len(HARD) else 0.1 * met
