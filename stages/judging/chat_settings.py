"""Settings of a chat model behind an OpenAI-compatible server that writes text (hints, instructions). Light to import."""

from __future__ import annotations

from stages.runtime.validation import Count, NonNegative, Positive, Section


class ChatParams(Section):
    """A chat model behind an OpenAI-compatible server. Replies are stored with their whole requests."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Address of the server. The key is read from the environment variable OPENAI_API_KEY, if it is set."""
    model: str = ""
    """The model's name at the server."""
    temperature: NonNegative = 0.0
    """Of its sampling."""
    max_tokens: Count = 256
    """Of a reply."""
    timeout_s: Positive = 60.0
    """Per attempt."""
    attempts: Count = 5
    """Attempts per request, failed ones included; then the run stops, and resumes where it was."""
    wait_s: NonNegative = 1.0
    """Pause before the second attempt; doubled each time, at most 30 s. A server's Retry-After of up to 300 s goes first; a
    longer one ends the run, which resumes where it was."""
    requests: Count = 4
    """Requests in flight."""
    cache: str = "data/replies"
    """Folder of all replies, relative to the repository: a run whose requests are in it needs no server. "" for none."""
