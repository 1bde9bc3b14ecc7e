"""What can go wrong with data. Every message is one sentence that says what to do next."""

from __future__ import annotations


class DataError(Exception):
    """Base of every error that this package raises about data."""


class MissingDataError(DataError, FileNotFoundError):
    """The files of a dataset are in none of the places that were searched."""


class DataFormatError(DataError, ValueError):
    """A file is there but is not what it should be: damaged, cut short, or in another format."""


class UnsafePickleError(DataFormatError):
    """A pickle asks for something that data never needs, such as calling a function of the system."""


class DownloadError(DataError, OSError):
    """A download failed: no server answered, or what arrived is not the file that was asked for."""


class TransferError(DownloadError):
    """No server sent the file: there is no connection, or nobody has it any more."""


class ChecksumError(DownloadError):
    """A downloaded file is complete, but its checksum is not the official one."""
