"""Every error a user can meet. Each message names the thing, the value, the limit and what to do.

All derive from `EdgeTransformerError`, so that a caller can catch one type; the command line maps each class to an exit
code.
"""

import errno

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


ON_THE_CPU = "let the CPU compute (--backend cpu of ete run, chat and serve)"
"""What is advised where a GPU does not do it."""


class EdgeTransformerError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_code = 1


class FormatError(EdgeTransformerError):
    """A model file is corrupt, truncated, hostile or uses a feature that is not read.

    Names file, tensor (if any), reason.
    """

    exit_code = 3

    def __init__(self, path: object, reason: str, *, tensor: str | None = None) -> None:
        self.path = str(path)
        self.tensor = tensor
        self.reason = reason
        where = f"{self.path}: tensor {tensor!r}: " if tensor is not None else f"{self.path}: "
        super().__init__(where + reason)


class FileChangedError(FormatError):
    """A mapped model file changed or was truncated while it was in use."""


class UnsupportedModelError(EdgeTransformerError):
    """The capability gate refuses a model: names the field or tensor, its value, and what is supported."""

    exit_code = 4


class ModelNotFoundError(EdgeTransformerError):
    """A model name cannot be resolved to files on this machine, or a download failed."""

    exit_code = 5


class TextError(EdgeTransformerError):
    """Tokenizer or chat template is missing, unknown, or failed on the given input."""

    exit_code = 6


class ContextLengthError(EdgeTransformerError):
    """The prompt, or prompt plus new tokens, does not fit in the context."""

    exit_code = 7


class NumericError(EdgeTransformerError):
    """NaN or infinity in the forward pass; names the layer where it first appears."""

    exit_code = 8


class CapacityError(EdgeTransformerError):
    """Memory asked for exceeds what there is.

    Names the allocation, bytes asked, bytes available, the option to lower.
    """

    exit_code = 9


class StorageError(EdgeTransformerError):
    """A file or folder cannot be read, written or deleted.

    Names what it is for, the file, the system's reason, and what to do.
    """


class GpuError(EdgeTransformerError):
    """A call of the GPU driver or compiler failed; names the call, its arguments and what was being done."""

    exit_code = 10


class UsageError(EdgeTransformerError):
    """An argument has a value outside its range; names argument, value and range."""

    exit_code = 2


def system_reason(error: OSError) -> str:
    """What the system refuses, for people: `FILE: reason`, or the reason alone where no file is known."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{error.filename}: {reason}"


def storage_error(error: OSError, what: str, remedy: str) -> StorageError | CapacityError:
    """The error for `what`, which the system refused: a CapacityError where the disk is full. remedy: what to do."""
    if error.errno in DISK_FULL:
        return CapacityError(f"{what}: {system_reason(error)}; make room, or {remedy}")
    return StorageError(f"{what}: {system_reason(error)}; {remedy}")
