"""The remedies that errors name."""

import errno

import pytest

from optrush.errors import ConfigError, write_remedy


@pytest.mark.parametrize(("failure", "do"), [
    (OSError(errno.ENOSPC, "No space left on device"), "free space there"),
    (OSError("rank 1: No space left on device: step-000010"), "free space there"),
    ("I/O error: No space left on device (os error 28)", "free space there"),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "free space there"),
    (OSError(errno.EACCES, "Permission denied"), "check that the folder exists and is writable"),
    (ValueError("shapes differ"), "check that the folder exists and is writable"),
    (ConfigError("a", "b", "name another folder"), "name another folder"),
])  # fmt: skip
def test_room_is_asked_for_only_where_a_disk_is_full(failure, do):
    assert write_remedy(failure) == do
