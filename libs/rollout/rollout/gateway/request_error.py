"""Errors that a request gets as its response."""

from typing import Any, NoReturn


class RequestError(Exception):
    """A request that gets an error as its response: HTTP status, message, and the parameter."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refuse(message: str, param: str | None = None, code: str | None = None) -> NoReturn:
    """Raise the RequestError of an invalid request (400)."""
    raise RequestError(400, message, param, code)
