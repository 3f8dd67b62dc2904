"""Tasks by path: `file.py:Name` or `package.module:Name`. Nothing is imported before it is asked for.

A config that was read holds the file's whole path; a run's folder keeps the path relative to itself, and a header only
the file's name, for its readers have other folders.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from cyber0.errors import ConfigError, Cyber0Error
from cyber0.settings import closest

OWN = "own"
"""The name of a task that was given in Python and that no path leads to."""

_PATH = re.compile(r"(?P<place>.+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)", re.DOTALL)
_FILE_MODULE = "cyber0_file_"  # how the module of a file is called in sys.modules: before its digest and its stem
_T = TypeVar("_T")


def is_path(name: str) -> bool:
    """Tell whether a name is a path to an object: file.py:Name or package.module:Name."""
    return _PATH.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """Tell whether a task of this name is a user's, not one of ours."""
    return name == OWN or is_path(name)


def _parts(path: str) -> tuple[str, str]:
    place, _, name = path.rpartition(":")
    return place, name


def located(path: str, folder: Path) -> str:
    """Return the path with the whole path of its file, which is relative to a folder; others stay as they are."""
    if not is_path(path) or not _parts(path)[0].endswith(".py"):
        return path
    place, name = _parts(path)
    return f"{(folder / Path(place).expanduser()).resolve()}:{name}"


def relative(path: str, folder: Path) -> str:
    """Return the path as seen from a folder."""
    place, name = _parts(path)
    if not is_path(path) or not os.path.isabs(place):
        return path
    try:
        return f"{Path(os.path.relpath(place, folder.resolve())).as_posix()}:{name}"
    except ValueError:  # another drive
        return path


def portable(path: str) -> str:
    """Return the path without the folders of its file: what a header, a title or a report says."""
    place, name = _parts(path)
    return f"{Path(place).name}:{name}" if is_path(path) and place.endswith(".py") else path


def short(path: str) -> str:
    """Return what a folder can be called: the object's name in small letters; a name that is no path, as it is."""
    return _parts(path)[1].lower() if is_path(path) else path


def source_of(path: str) -> Path | None:
    """Return the file that the path's object is defined in, if it can be found without importing it."""
    if not is_path(path):
        return None
    place, _ = _parts(path)
    if place.endswith(".py"):
        found = Path(place)
    else:
        module = sys.modules.get(place)
        spec = getattr(module, "__spec__", None)
        if spec is None and "." not in place:  # looking for a module inside a package imports the package
            spec = importlib.util.find_spec(place)
        found = Path(spec.origin) if spec is not None and spec.origin else Path()
    return found if found.is_file() else None


def file_in(path: str) -> str:
    """Return the file that a path names; empty if it names none."""
    return _parts(path)[0] if is_path(path) and _parts(path)[0].endswith(".py") else ""


def digest_of(path: str) -> str | None:
    """Return the SHA-256 of the file that the path's object is defined in, if it can be found."""
    source = source_of(path)
    return None if source is None else hashlib.sha256(source.read_bytes()).hexdigest()


def load_object(path: str, base_folder: Path) -> Any:
    """Import the object that a path names; a file's path is relative to the base folder.

    Raises:
        ConfigError: there is no such file or module, it raises while it is imported, or it has no such name.
    """
    if not is_path(path):
        raise ConfigError(f"{path!r} is no path to an object; write file.py:Name or package.module:Name")
    place, name = _parts(located(path, base_folder))
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [known for known in vars(module) if not known.startswith("_")]
        near = closest(name, public)
        remedy = f"did you mean {near!r}?" if near else "check the name after the colon"
        raise ConfigError(f"{place} has no {name!r}; {remedy}") from None


def name_of(kind: type) -> str:
    """Return the path that leads to a class, as a header says it; "own" if none does."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if "." in kind.__qualname__ or module is None:  # within a function, or in a module that is gone
        return OWN
    if kind.__module__ == "__main__" or kind.__module__.startswith(_FILE_MODULE):
        return f"{Path(file).name}:{kind.__qualname__}" if file and file.endswith(".py") else OWN
    return f"{kind.__module__}:{kind.__qualname__}"


def called(what: str, call: Callable[[], _T], kind: type[Cyber0Error] = ConfigError) -> _T:
    """Call a user's code; what it raises becomes an error of one line that says where."""
    try:
        return call()
    except Cyber0Error:
        raise
    except Exception as error:  # a user's code may raise anything
        raise kind(f"{what} failed: {described(error)}") from error


def described(error: BaseException) -> str:
    """Return an exception in one line, with the last place outside of installed packages that it came through."""
    text = str(error).strip().split("\n")[0]
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {text}"
    ours = str(Path(__file__).parent.parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if "site-packages" not in f.filename and not f.filename.startswith((ours, "<"))]  # fmt: skip
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"there is no file {path}; a path in a config file is relative to that file, else to the working directory"
        )
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"{_FILE_MODULE}{digest}_{path.stem}"
    if name in sys.modules:  # unchanged since: what it has read is not read again
        return sys.modules[name]
    _see(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _import_error(str(path), error) from error
    return module


def _import_module(name: str) -> ModuleType:
    _see(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_error(name, error) from error
        raise ConfigError(f"there is no module {error.name}; install it, run in the folder that holds it, or name its "
                          "file as file.py:Name") from None  # fmt: skip
    except BaseException as error:
        raise _import_error(name, error) from error


def _import_error(what: str, error: BaseException) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return error
    return ConfigError(f"{what} can't be imported: {described(error)}")


def _see(folder: Path) -> None:
    """Let what lies in a folder be imported, unless something installed has its name."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
