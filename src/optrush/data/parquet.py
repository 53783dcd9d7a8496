"""Rows of a Parquet file, a few at a time, as JSON has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optrush.data.compressed import Damaged, PIECE_bytes
from optrush.data.formats import Found, LONGEST_ROW_bytes, too_long
from optrush.data.rows import MEANT
from optrush.data.strict import decode, show

MOST_ROWS = 256  # decoded at once


def parts(path: Path, size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(number of its first row, first row group, row group after the last) of parts of about `size_bytes`."""
    with _opened(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    first, start, held, size = 1, 0, 0, 0
    for i, group in enumerate(groups):
        held, size = held + group.num_rows, size + group.total_byte_size
        if held and (size >= size_bytes or i + 1 == len(groups)):
            yield first, start, i + 1
            first, start, held, size = first + held, i + 1, 0, 0


def rows(path: Path, first: int = 1, start: int = 0, end: int | None = None) -> Found:
    """The rows of the row groups [start, end), numbered from `first`, without their nulls."""
    import pyarrow

    row = first - 1
    with _opened(path) as file:
        schema = file.schema_arrow
        twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if twice is not None:
            raise Damaged(f"two columns are named {show(twice)}")
        leaves = {field.name: list(_leaves(field.type)) for field in schema}
        columns = [name for name, types in leaves.items() if name in MEANT or all(map(_in_json, types))]
        spelt = {name: schema.field(name).type for name in columns if any(map(_is_json, leaves[name]))}
        groups = range(file.num_row_groups)[start:end]
        try:
            # One thread: whoever wants more reads several parts at once.
            for batch in file.iter_batches(MOST_ROWS, row_groups=groups, columns=columns, use_threads=False):
                for found in _batch(batch, spelt):
                    row += 1
                    yield row, found
        except (pyarrow.ArrowException, OSError) as error:
            raise Damaged(f"a damaged Parquet file: {_first_line(error)}") from error


def _opened(path: Path) -> Any:
    """The file, of which only what is asked for is read."""
    import pyarrow.parquet

    options = {"pre_buffer": False, "buffer_size": PIECE_bytes, "page_checksum_verification": True}
    try:
        return pyarrow.parquet.ParquetFile(path, **options)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Damaged(f"a damaged or cut off Parquet file: {_first_line(error)}") from error


def _batch(batch: Any, spelt: dict[str, Any]) -> list[dict[str, Any] | str]:
    """The rows of a batch; one by one where they are large or one is bad."""
    if batch.nbytes <= LONGEST_ROW_bytes:
        try:
            return [_row(row, spelt) for row in batch.to_pylist()]
        except ValueError:
            pass  # one of them: which, and why, is found out below
    return [_alone(batch.slice(i, 1), spelt) for i in range(len(batch))]


def _alone(one: Any, spelt: dict[str, Any]) -> dict[str, Any] | str:
    if one.nbytes > LONGEST_ROW_bytes:
        return too_long()
    try:
        return _row(one.to_pylist()[0], spelt)
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 in {show(error.object[:20].decode('utf-8', 'replace'))}"
    except ValueError as error:
        return _first_line(error)


def _row(found: dict[str, Any], spelt: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = _present(found)
    return row | {name: _decoded(row[name], spelt[name]) for name in spelt.keys() & row.keys()} if spelt else row


def _present(found: Any) -> Any:
    """The value without the nulls in its objects."""
    if isinstance(found, dict):
        return {key: _present(value) for key, value in found.items() if value is not None}
    return [_present(value) for value in found] if isinstance(found, list) else found


def _decoded(found: Any, type_: Any) -> Any:
    """The value with what its type says to be JSON text decoded (its nulls are the author's, and stay)."""
    if _is_json(type_) and isinstance(found, str):
        return decode(found.encode())
    if isinstance(found, list):
        return [_decoded(value, type_.value_type) for value in found]
    if isinstance(found, dict):
        return {name: _decoded(value, type_.field(name).type) for name, value in found.items()}
    return found


def _leaves(type_: Any) -> Iterator[Any]:
    from pyarrow import types

    if types.is_struct(type_):
        for field in type_:
            yield from _leaves(field.type)
    elif types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        yield from _leaves(type_.value_type)
    else:
        yield type_.value_type if types.is_dictionary(type_) else type_


def _is_json(type_: Any) -> bool:
    import pyarrow

    return isinstance(type_, pyarrow.JsonType)


def _in_json(type_: Any) -> bool:
    """Whether JSON has such values."""
    from pyarrow import types

    text = types.is_string(type_) or types.is_large_string(type_) or _is_json(type_)
    number = types.is_boolean(type_) or types.is_integer(type_) or types.is_floating(type_)
    return bool(text or number or types.is_null(type_))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
