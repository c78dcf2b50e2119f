"""One OpenAI-compatible server: requests that are counted, timed and sent once. Standard library only."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from replayscope.inspector.errors import ReplayScopeError, UsageError

_TIMEOUT = 120.0
TOP = 5


class RequestFailed(Exception):
    """A request that brought no answer; says why. It is not sent again."""


class Spent(ReplayScopeError):
    """The bounds of all requests together are reached."""


@dataclass
class Bounds:
    """requests, seconds: what is left; began: when the first was sent."""

    requests: int
    seconds: float
    began: float = field(default_factory=time.monotonic)

    def take(self) -> float:
        """Count one request; the seconds that it may take. Raises Spent."""
        left = self.seconds - (time.monotonic() - self.began)
        if self.requests < 1 or left <= 0:
            raise Spent("the bounds are reached; raise --max-requests or --max-seconds and run it again to go on")
        self.requests -= 1
        return min(_TIMEOUT, left)


@dataclass(frozen=True)
class Answer:
    """text; top: per token the likeliest tokens with their log-probabilities, None where the server gives none; cached,
    prompt: tokens as the server counted them, None where it does not; ttft, total: seconds."""

    text: str
    top: list[dict[str, float]] | None
    tokens: list[str] | None
    cached: int | None
    prompt: int | None
    ttft: float
    total: float


class Engine:
    """url: ends in /v1. model: its name there. refused: fields that the server does not take, found by `probe`."""

    def __init__(self, url: str, model: str, bounds: Bounds) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--endpoint {url}: give an http address that ends in /v1")
        try:
            parts = urllib.parse.urlsplit(url)
            # Without a port there is nothing to check; 0 is none that a server can have.
            fits = bool(parts.hostname) and parts.port != 0 and url.isprintable() and " " not in url
        except ValueError:
            fits = False
        if not fits:
            raise UsageError(f"--endpoint {url!r} is no address: give http://HOST:PORT/v1 with a port from 1 to 65535")
        self.url, self.model, self.bounds = url.rstrip("/") + "/completions", model, bounds
        self.refused: dict[str, str] = {}

    def probe(self) -> None:
        """Find out which optional fields the server takes, a request each. Raises UsageError if it does not answer."""
        try:
            self._send("probe", 1, None, {})
        except RequestFailed as error:
            raise UsageError(f"{self.url} does not answer: {error}; check --endpoint and --engine-model") from None
        for name, value in (("logprobs", TOP), ("stream_options", {"include_usage": True})):
            try:
                self._send("probe", 1, None, {name: value})
            except RequestFailed as error:
                self.refused[name] = str(error)

    def ask(self, prompt: str, tokens: int, salt: str | None = None) -> Answer:
        """Greedy continuation of a prompt by that many tokens. Raises RequestFailed, or Spent."""
        fields = {"logprobs": TOP, "stream_options": {"include_usage": True}}
        return self._send(prompt, tokens, salt, {k: v for k, v in fields.items() if k not in self.refused})

    def _send(self, prompt: str, tokens: int, salt: str | None, more: dict[str, Any]) -> Answer:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "seed": 0,
            "stream": True,
        }
        body |= more | ({"cache_salt": salt} if salt else {})
        request = urllib.request.Request(
            self.url, json.dumps(body).encode(), {"Content-Type": "application/json", "Accept": "text/event-stream"}
        )
        allowed, began = self.bounds.take(), time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=allowed) as reply:
                return _read(reply, began)
        except urllib.error.HTTPError as error:
            raise RequestFailed(f"HTTP {error.code}: {error.read(200).decode('utf-8', 'replace')}") from None
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestFailed(_why(error)) from None


def _why(error: Exception) -> str:
    """An error in words; urllib wraps those of the connection."""
    inside = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inside, ConnectionRefusedError):
        return "connection refused"
    if isinstance(inside, TimeoutError):
        return "no answer in time"
    if isinstance(inside, OSError) and inside.strerror:
        return inside.strerror
    return inside if isinstance(inside, str) else f"{type(inside).__name__}: {inside}"


def _read(reply: Any, began: float) -> Answer:
    """The chunks of a streamed answer, as they come."""
    text, top, tokens, first, usage = "", list[dict[str, float]](), list[str](), None, {}
    for raw in reply:
        line = raw.decode("utf-8").strip()
        if not line.startswith("data:") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data:"))
        if "error" in chunk:
            raise ValueError(f"the server says {chunk['error']!r:.200}")
        for choice in chunk.get("choices") or []:
            if choice.get("text"):
                first = first or time.perf_counter()
                text += choice["text"]
            if told := choice.get("logprobs"):
                top += [dict(one) for one in told.get("top_logprobs") or []]
                tokens += told.get("tokens") or []
        usage = chunk.get("usage") or usage
    end = time.perf_counter()
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text, top or None, tokens or None, details.get("cached_tokens"), usage.get("prompt_tokens"),
        (first or end) - began, end - began,
    )  # fmt: skip
