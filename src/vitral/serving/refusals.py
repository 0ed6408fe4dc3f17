"""What is answered when something is not done: a status, a code for programs, a sentence for people."""

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from vitral.errors import ImageError, InputError, UnknownNameError, UnreachableError
from vitral.serving.batching import BusyError

RETRY_AFTER = 1
"""Seconds until one may ask again."""


class RefusedError(Exception):
    """An answer that says what is wrong, and how to mend it."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}

    def response(self) -> JSONResponse:
        """As it is sent."""
        return JSONResponse({"error": {"code": self.code, "message": self.message}}, self.status, self.headers)


def busy() -> RefusedError:
    """Too much was asked at once."""
    return RefusedError(
        503, "busy", f"the server has more to do than it can; ask again in {RETRY_AFTER} s.",
        {"Retry-After": str(RETRY_AFTER)},
    )  # fmt: skip


def late() -> RefusedError:
    """The deadline has passed."""
    return RefusedError(
        504,
        "late",
        "the answer was not ready in time; ask for less, or later; whoever runs the server can raise --deadline.",
    )


def gone() -> RefusedError:
    """Nobody waits for the answer: it is for the log alone."""
    return RefusedError(400, "gone", "the client has left.")


_PLAIN = {
    400: ("bad_request", "the request cannot be read."),
    404: ("not_found", "there is nothing at this address; /docs lists what there is."),
    405: ("bad_method", "this address does not take this method; /docs lists what it takes."),
}


def refusal_of(error: Exception) -> RefusedError:
    """How an error is answered; one of ours says nothing of how it came about."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, BusyError):
        return busy()
    if isinstance(error, ImageError):
        return RefusedError(422, "bad_image", str(error))
    if isinstance(error, UnknownNameError):
        return RefusedError(422, "unknown_name", str(error))
    if isinstance(error, UnreachableError):  # where, and why, is for the log
        return RefusedError(
            503, "unreachable", "the database that the index is kept in does not answer now; ask again later.",
            {"Retry-After": str(RETRY_AFTER)},
        )  # fmt: skip
    if isinstance(error, InputError):
        return RefusedError(422, "bad_input", str(error))
    if isinstance(error, HTTPException):
        code, message = _PLAIN.get(error.status_code, ("refused", str(error.detail)))
        return RefusedError(error.status_code, code, message, dict(error.headers or {}))
    return RefusedError(500, "internal", "an error of ours, not yours; the details are in the server's log.")
