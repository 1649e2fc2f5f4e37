"""The exception tree of Negamax.

An error that a user can cause has an HTTP status, an exit code, and a message with the value, the
limit and the remedy. Any other exception is a bug and is reported as an internal error.
"""

import errno
from collections.abc import Collection
from pathlib import Path


class NegamaxError(Exception):
    """The base class of all errors. `hint` states the remedy, `param` is the name of the invalid
    request field, and `code` is a stable machine-readable word. The same request may succeed after
    `retry_after` seconds.
    """

    http_status = 500
    error_type = "internal_error"
    exit_code = 1
    retry_after: float | None = None  # Seconds until a retry may succeed; None: unknown.

    def __init_subclass__(
        cls,
        status: int | None = None,
        kind: str | None = None,
        exit_code: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Set the given fields of a new class. The class inherits the fields that are not given."""
        cls.http_status = status or cls.http_status
        cls.error_type = kind or cls.error_type
        cls.exit_code = exit_code or cls.exit_code
        cls.retry_after = retry_after or cls.retry_after

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
        self.message, self.hint = message, hint
        self.param, self.code = param, code
        if retry_after is not None:
            self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequestError(NegamaxError, status=400, kind="invalid_request_error", exit_code=2):
    """An invalid request, which the client must change (400)."""


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt plus the requested output, exceeds the context length (400)."""

    @classmethod
    def of_prompt(
        cls, num_tokens: int, *, context_length: int, param: str, is_counted: bool = True
    ) -> "ContextLengthError":
        """Return the error of a prompt that leaves no room for an answer.

        If `is_counted` is False, the prompt has at least `num_tokens` tokens. Anthropic's clients
        recognize the message's first sentence, OpenAI's clients its second sentence.
        """
        maximum = context_length if num_tokens > context_length else context_length - 1
        more = "" if is_counted else " (or more; the rest was not counted)"
        return cls(
            f"prompt is too long: {num_tokens} tokens > {maximum} maximum{more}. "
            f"This model's maximum context length is {context_length} tokens, output included; "
            "shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


class AuthenticationError(NegamaxError, status=401, kind="authentication_error"):
    """A missing or wrong API key (401)."""


class ForbiddenError(NegamaxError, status=403, kind="permission_error"):
    """A request from an origin that this server does not accept (403)."""


class NotFoundError(NegamaxError, status=404, kind="not_found_error", exit_code=2):
    """An unknown model or route (404)."""


class PayloadTooLargeError(NegamaxError, status=413, kind="invalid_request_error"):
    """A request body over the size limit (413)."""


class UnsupportedMediaTypeError(NegamaxError, status=415, kind="invalid_request_error"):
    """A request body in an unsupported encoding (415)."""


class UrlTooLongError(NegamaxError, status=414, kind="invalid_request_error"):
    """A URL over the size limit (414)."""


class HeadTooLargeError(NegamaxError, status=431, kind="invalid_request_error"):
    """Request headers over the limits on size and number (431)."""


class RequestTimeoutError(NegamaxError, status=408, kind="timeout_error"):
    """The request took too long to arrive or to be answered (408)."""


class OverloadedError(NegamaxError, status=429, kind="rate_limit_error", retry_after=1.0):
    """The queue is full. The same request may succeed later (429)."""


class AbortedError(NegamaxError, status=499, kind="request_aborted"):
    """The request was aborted (499). Clients do not repeat a request after status 499."""


class EngineError(NegamaxError, status=500, kind="internal_error"):
    """The engine failed while it served a request (500)."""


class UnavailableError(NegamaxError, status=503, kind="service_unavailable_error"):
    """The server accepts no requests, because it stops or its engine restarts (503)."""


class EngineDeadError(UnavailableError):
    """The engine process has ended, and its requests are lost (503)."""


class ConfigError(NegamaxError, status=400, kind="invalid_request_error", exit_code=2):
    """An invalid option, config.json value or combination of options (exit code 2)."""


class CheckpointError(ConfigError):
    """A checkpoint with missing, surplus, truncated or misshapen files or tensors (exit code 2)."""

    @classmethod
    def of_file(cls, path: Path, error: OSError) -> "CheckpointError":
        """Return the error of a file that cannot be read."""
        hint = "download the file again"
        if error.errno in (errno.EACCES, errno.EPERM):
            hint = "give this user read permission, for example with chmod, or run as another user"
        return cls(f"{path} cannot be read: {error.strerror or error}", hint=hint)


class ResourceError(ConfigError):
    """A resource that the machine lacks, such as memory, a port or a device (exit code 2)."""

    @classmethod
    def of_system(cls, error: OSError) -> "ResourceError":
        """Return an error that states on one line why the system refused an operation."""
        if error.errno == errno.ENAMETOOLONG:
            name = max(str(error.filename or "").split("/"), key=len)
            return cls(
                f"{name[:40]}... is a file name of {len(name)} characters; the system allows 255 "
                f"bytes",
                hint="use a shorter file name",
            )
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return cls("too many files are open", hint="raise the limit, as with ulimit -n 65536")
        if error.errno == errno.EBADF and error.filename is None:
            hint = "redirect the stream, as with </dev/null or >/dev/null"
            return cls("standard input or standard output is closed", hint=hint)
        what = f"{error.filename}: " if error.filename is not None else ""
        return cls(f"{what}{error.strerror or error}")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise `ConfigError` if the value of the option `name` is not one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r:.62}; allowed: {', '.join(choices)}")
