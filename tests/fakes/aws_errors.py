"""Errors as AWS's services answer with them."""

from __future__ import annotations


class AwsError(Exception):
    """An answer that is an error.

    Args:
        code: AWS's name of it.
        message: for people.
        status: of HTTP.
    """

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


def not_found() -> AwsError:
    """What SageMaker says of a job it does not know: not the error that its model has for that."""
    return AwsError("ValidationException", "Requested resource not found.")
