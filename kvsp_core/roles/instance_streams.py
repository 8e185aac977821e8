"""The requests for output at an instance: each session has one stream, the one asked for last, and requests
that wait until it is known whether the prompt is needed (decision W31)."""

from __future__ import annotations

from typing import Final

from kvsp_core.answers import lines_response
from kvsp_core.bodies import encode
from kvsp_core.ext_messages import OutputEnd, OutputToken
from kvsp_core.problems import Problem
from kvsp_core.roles.role import Respond, Send
from kvsp_core.roles.served_session import ServedSession
from kvsp_core.roles.serving import refuse
from kvsp_core.roles.work import Work

__all__ = ["Streams"]

_NOT_ASKED: Final = ("", "")


class Streams:
    """The streams of all sessions of an instance, and the requests that wait for one."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._asked: dict[int, tuple[str, str]] = {}  # request -> session, client

    def session_of(self, request_id: int) -> str:
        """Return the session that a request is for; an empty string where it is for none."""
        return self._asked.get(request_id, _NOT_ASKED)[0]

    def asked(self) -> tuple[tuple[int, str, str], ...]:
        """Return the requests that stream or wait: number, session and client of each."""
        return tuple((request_id, *of) for request_id, of in self._asked.items())

    def enter(self, session: ServedSession, request_id: int, client: str) -> None:
        """Take in a request of a client for the output of a session."""
        self._asked[request_id] = session.name, client

    def begin(self, session: ServedSession, request_id: int) -> None:
        """Stream the output of a session to a request from now on, and to no other."""
        self.cut(session)
        session.stream = request_id
        self._work.emit(Respond(request_id, lines_response(), streaming=True))

    def send(self, session: ServedSession, epoch: int, first_index: int, tokens: tuple[int, ...]) -> None:
        """Send tokens, where somebody streams the session."""
        if session.stream is None:
            return
        lines = (
            encode(OutputToken(index=index, epoch=epoch, token=token)) + b"\n"
            for index, token in enumerate(tokens, first_index)
        )
        self._work.emit(Send(session.stream, b"".join(lines)))

    def end(self, session: ServedSession, last: OutputEnd) -> None:
        """Send the end line, and end the stream with it."""
        self._end(session, encode(last) + b"\n")

    def cut(self, session: ServedSession) -> None:
        """End a stream without its end line."""
        self._end(session, b"")

    def _end(self, session: ServedSession, data: bytes) -> None:
        if session.stream is not None:
            self._work.emit(Send(session.stream, data, end=True))
            self._asked.pop(session.stream, None)
            session.stream = None

    def refuse_waiting(self, session: ServedSession, problem: Problem) -> None:
        """Answer all requests that wait with a problem."""
        for request_id, _ in session.waiting:
            self._work.emit(refuse(request_id, problem))
        session.waiting.clear()

    def gone(self, request_id: int) -> str:
        """Take note that a request is gone, answered or not; return the session that it was for."""
        return self._asked.pop(request_id, _NOT_ASKED)[0]
