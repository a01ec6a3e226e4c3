"""Settings of an OpenAI-compatible server, checked when they are made."""

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class OpenAIConfig:
    """A server that takes a prompt's ids at BASE_URL/completions, and returns ids and log-probs (vLLM's does)."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """URL up to and with its /v1."""
    model: str | None = None
    """Name of the model on the server; None: the only one that the server has."""
    vocab_size: int | None = None
    """Number of the model's ids, where it is known: others are refused here. A server without a tokenizer (vLLM:
    --skip-tokenizer-init) does not check them, and one such id ends its engine."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the server's key; unset where it asks for none."""
    allow_remote: bool = False
    """Whether the server may be on another machine; it then must use https."""
    answer_seconds: float = 600.0
    """Seconds without a response after which a request counts as lost."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url) if isinstance(self.base_url, str) else urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url is http://HOST:PORT/v1 or https://..., got {self.base_url!r}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("base_url holds no key and no options: the key goes into the variable of key_variable")
        if not is_loopback(parts.hostname):
            if not self.allow_remote:
                raise ValueError(
                    f"base_url {self.base_url!r} is another machine: say allow_remote=True if that is meant"
                )
            if parts.scheme != "https":
                raise ValueError(f"base_url {self.base_url!r} would send key and prompts in the clear: use https")
        if self.model is not None and not self.model:
            raise ValueError("model must name one of the server's models, or be left out")
        size = self.vocab_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"vocab_size must be a whole number of at least 1, got {size!r}")
        if not self.key_variable.isidentifier():
            raise ValueError(f"key_variable is the name of an environment variable, got {self.key_variable!r}")
        if not 0 < self.answer_seconds < float("inf"):
            raise ValueError(f"answer_seconds must be above 0 and finite, got {self.answer_seconds}")

    def url(self, path: str) -> str:
        """Return the URL of one of the server's routes."""
        return f"{self.base_url.rstrip('/')}/{path}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request: the key, where there is one."""
        key = os.environ.get(self.key_variable)
        return {"Authorization": f"Bearer {key}"} if key else {}


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, by its name alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
