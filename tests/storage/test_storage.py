"""Writing a file whole or not at all, and keeping writers apart: one home for each."""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path

import pytest

import cyber0
from cyber0.errors import DataError, LedgerError
from cyber0.storage import replacing, write_text
from cyber0.storage.disk import HAS_LOCKS, OSDisk, locked

PACKAGE = Path(cyber0.__file__).parent


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_a_private_file_is_never_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    with replacing(path, private=True) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        temporary.write_text("7")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text() == "7"


def test_a_file_that_can_not_be_written_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(DataError, match=r"a\.txt can't be written: no room"), replacing(path) as temporary:
        temporary.write_text("half of the new")
        raise OSError("no room")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"] and path.read_text() == "old"


@pytest.mark.skipif(not HAS_LOCKS, reason="this system has no locks")
def test_a_folder_is_locked_by_one_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(LedgerError, match="is being written by another process"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_new_file_is_there_in_whole_or_not_at_all(tmp_path: Path) -> None:
    with OSDisk().create(tmp_path / "a", b"whole") as file:
        assert file.size() == 5
    with pytest.raises(FileExistsError):
        OSDisk().create(tmp_path / "a", b"another")
    assert (tmp_path / "a").read_bytes() == b"whole" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fcntl", "os.replace", "os.link", "os.rename", "temporary.replace", "temporary.write_text"]
)
def test_files_are_replaced_and_locked_in_one_place(name: str) -> None:
    """By a name in an import, or a call."""

    def uses(source: Path) -> bool:
        tree = ast.walk(ast.parse(source.read_text("utf-8")))
        return any(
            (isinstance(node, ast.Import) and name in [alias.name for alias in node.names])
            or (isinstance(node, ast.Call) and ast.unparse(node.func) == name)
            for node in tree
        )

    homes = [file.relative_to(PACKAGE).as_posix() for file in sorted(PACKAGE.rglob("*.py")) if uses(file)]
    assert all(home.startswith("storage/") for home in homes), homes
