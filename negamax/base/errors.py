"""The exception tree of Negamax.

An error that a user can cause states the value, the limit and the remedy, and has an HTTP status
and a process exit code. Any other exception is a bug and is reported as an internal error.
"""

from __future__ import annotations

import errno
from pathlib import Path


class NegamaxError(Exception):
    """Root of the tree: a message for people, and how it is reported.

    `hint`: an optional second sentence; `param`: the request field at fault; `code`: a stable
    machine-readable word; `retry_after`: seconds after which the same request may succeed.
    """

    http_status: int = 500
    error_type: str = "internal_error"
    exit_code: int = 1
    retry_after: float | None = None  # seconds

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.code = code
        if retry_after is not None:
            self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequestError(NegamaxError):
    """A request that can never be served as it was sent (400)."""

    http_status = 400
    error_type = "invalid_request_error"
    exit_code = 2


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt plus requested output, is longer than the context length (400)."""

    @classmethod
    def of_prompt(
        cls, num_tokens: int, *, context_length: int, param: str, is_counted: bool = True
    ) -> ContextLengthError:
        """The error of a prompt without room for an answer. `is_counted` False: it has more tokens.

        Clients recognise it by these words and numbers, and shorten the conversation: Anthropic's
        by the first sentence, OpenAI's by the second.
        """
        maximum = context_length if num_tokens > context_length else context_length - 1
        more = "" if is_counted else " (or more; the rest was not counted)"
        return cls(
            f"prompt is too long: {num_tokens} tokens > {maximum} maximum{more}. This model's "
            f"maximum "
            f"context length is {context_length} tokens, output included; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


class AuthenticationError(NegamaxError):
    """A missing or wrong API key (401)."""

    http_status = 401
    error_type = "authentication_error"


class ForbiddenError(NegamaxError):
    """A request that this server does not accept from its origin (403)."""

    http_status = 403
    error_type = "permission_error"


class NotFoundError(NegamaxError):
    """An unknown model or route (404)."""

    http_status = 404
    error_type = "not_found_error"
    exit_code = 2


class PayloadTooLargeError(NegamaxError):
    """A request body over the size limit (413)."""

    http_status = 413
    error_type = "invalid_request_error"


class UnsupportedMediaTypeError(NegamaxError):
    """A request body in an unsupported encoding (415)."""

    http_status = 415
    error_type = "invalid_request_error"


class UrlTooLongError(NegamaxError):
    """A URL over the size limit (414)."""

    http_status = 414
    error_type = "invalid_request_error"


class HeadTooLargeError(NegamaxError):
    """Request headers over the limits on size and number (431)."""

    http_status = 431
    error_type = "invalid_request_error"


class RequestTimeoutError(NegamaxError):
    """The request took too long to arrive or to be answered (408)."""

    http_status = 408
    error_type = "timeout_error"


class OverloadedError(NegamaxError):
    """The queue is full; the same request may succeed later (429)."""

    http_status = 429
    error_type = "rate_limit_error"
    retry_after = 1.0


class AbortedError(NegamaxError):
    """The request was aborted (499: clients do not repeat it)."""

    http_status = 499
    error_type = "request_aborted"


class EngineError(NegamaxError):
    """The engine failed while it served a request (500)."""

    http_status = 500
    error_type = "internal_error"


class UnavailableError(NegamaxError):
    """The server accepts no requests now: it stops, or its engine restarts (503)."""

    http_status = 503
    error_type = "service_unavailable_error"


class EngineDeadError(UnavailableError):
    """The engine process is gone, and its work is lost (503)."""


class ConfigError(NegamaxError):
    """An option, a config.json value or a combination that cannot work (exit code 2)."""

    http_status = 400
    error_type = "invalid_request_error"
    exit_code = 2


class CheckpointError(ConfigError):
    """A checkpoint with missing, surplus, truncated or misshapen files or tensors (exit code 2)."""

    @classmethod
    def of_file(cls, path: Path, error: OSError) -> CheckpointError:
        """The error of a file that cannot be read."""
        hint = "download the file again"
        if error.errno in (errno.EACCES, errno.EPERM):
            hint = "let this user read it, as with chmod, or run as another user"
        return cls(f"{path} cannot be read: {error.strerror or error}", hint=hint)


class ResourceError(ConfigError):
    """Memory, port or device that the configuration needs and the machine lacks (exit code 2)."""

    @classmethod
    def of_system(cls, error: OSError) -> ResourceError:
        """The system's refusal on one line."""
        if error.errno == errno.ENAMETOOLONG:
            name = max(str(error.filename or "").split("/"), key=len)
            return cls(
                f"{name[:40]}... is a file name of {len(name)} characters; the system allows 255 "
                f"bytes",
                hint="give a shorter one",
            )
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return cls("too many files are open", hint="raise the limit, as with ulimit -n 65536")
        if error.errno == errno.EBADF and error.filename is None:
            hint = "redirect it, as with </dev/null or >/dev/null"
            return cls("standard input or standard output is closed", hint=hint)
        what = f"{error.filename}: " if error.filename is not None else ""
        return cls(f"{what}{error.strerror or error}")
