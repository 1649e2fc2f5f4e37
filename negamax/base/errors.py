"""The one exception tree of Negamax.

Every error that a person can cause carries what was given, what is allowed and what to do instead, and knows the HTTP status
and the process exit code it maps to. Anything else that escapes is a bug of ours and is reported as an internal error.
"""

from __future__ import annotations


class NegamaxError(Exception):
    """Root of the tree: a message for people, and how the border reports it.

    `hint` is an optional second sentence; `param` names the request field at fault, `code` is a stable machine-readable word.
    """

    http_status: int = 500
    error_type: str = "internal_error"
    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequestError(NegamaxError):
    """A request that can never be served as it was sent (400)."""

    http_status = 400
    error_type = "invalid_request_error"
    exit_code = 2


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt plus requested output, is longer than the window (400)."""


class AuthenticationError(NegamaxError):
    """A missing or wrong API key (401)."""

    http_status = 401
    error_type = "authentication_error"


class NotFoundError(NegamaxError):
    """An unknown model or route (404)."""

    http_status = 404
    error_type = "not_found_error"
    exit_code = 2


class PayloadTooLargeError(NegamaxError):
    """A request body over the size limit (413)."""

    http_status = 413
    error_type = "invalid_request_error"


class OverloadedError(NegamaxError):
    """The queue is full; the same request may succeed later (429)."""

    http_status = 429
    error_type = "rate_limit_error"


class EngineError(NegamaxError):
    """The engine failed while it served a request (500)."""

    http_status = 500
    error_type = "internal_error"


class EngineDeadError(NegamaxError):
    """The engine process is gone; nothing can be served until a restart (503)."""

    http_status = 503
    error_type = "service_unavailable_error"


class ConfigError(NegamaxError):
    """An option, a config.json value or a combination that cannot work (exit code 2)."""

    http_status = 400
    error_type = "invalid_request_error"
    exit_code = 2


class CheckpointError(ConfigError):
    """A checkpoint with missing, surplus, truncated or mis-shaped files or tensors (exit code 2)."""


class ResourceError(ConfigError):
    """Memory, port or device that the chosen configuration needs and the machine does not have (exit code 2)."""
