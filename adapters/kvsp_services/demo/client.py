"""An ordinary client of the front end: OpenAI's own, asking one question at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import openai

__all__ = ["Client", "Reply"]


@attrs.define
class Reply:
    """What came back for one question, and when."""

    text: str = ""
    first_s: float = 0.0
    """Until the first piece of the answer."""
    longest_wait_s: float = 0.0
    """Between two pieces."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reason: str = ""


class Client:
    """Asks the model at an address."""

    def __init__(self, url: str, model: str, *, timeout_s: float) -> None:
        self._model = model
        # No retries: what the cluster survives, it survives without its clients' help.
        self._client = openai.OpenAI(api_key="-", base_url=url, max_retries=0, timeout=timeout_s)

    def ask(
        self,
        prompt: str,
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        after: int = 0,
        then: Callable[[], None] | None = None,
        into: Reply | None = None,
    ) -> Reply:
        """Ask, and read the answer as it is streamed; call `then` once, after so many pieces of it.

        `into` is where it goes; it has what came before an error.
        """
        reply = into or Reply()
        began = last = time.monotonic()
        stream = self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=0.95,
            seed=seed,
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces = 0
        for chunk in stream:
            if chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details
                reply.prompt_tokens = chunk.usage.prompt_tokens
                reply.output_tokens = chunk.usage.completion_tokens
                reply.cached_tokens = (details.cached_tokens or 0) if details else 0
            for choice in chunk.choices:
                reply.reason = choice.finish_reason or reply.reason
                if not choice.delta.content:
                    continue
                now = time.monotonic()
                if not pieces:
                    reply.first_s = now - began
                else:
                    reply.longest_wait_s = max(reply.longest_wait_s, now - last)
                last = now
                pieces += 1
                reply.text += choice.delta.content
                if then is not None and pieces >= after:
                    once, then = then, None
                    once()
                    last = time.monotonic()
        return reply
