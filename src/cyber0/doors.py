"""What a user brings: objects named by a path, `file.py:name` or `package.module:name`.

    clipped = load("my_rules.py:clipped", "aggregation.rule")

A file is found relative to the working directory; `config.load` makes the paths of a config file relative to its
folder. Loading runs the user's code, so only what the user's own config or command line names is loaded, never what a
ledger's header names.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from cyber0.errors import ConfigError, Cyber0Error
from cyber0.settings import suggestion

MODULE = "cyber0_own_"
"""How the names of modules begin that were loaded from a file."""
_closed: ContextVar[str] = ContextVar("closed", default="")
_loaded: dict[Path, tuple[tuple[int, int], ModuleType]] = {}


def is_path(name: str) -> bool:
    """Return whether a name is a path to an object, and not the name of something registered."""
    return ":" in name


def short(name: str) -> str:
    """Return a path without its folders: the same on every machine, for headers and titles."""
    module, colon, inner = name.rpartition(":")
    return f"{os.path.basename(module)}:{inner}" if colon and _is_file(module) else name


def rebased(name: str, folder: Path) -> str:
    """Return a path that is relative to a folder as one that is relative to the working directory."""
    module, colon, inner = name.rpartition(":")
    return f"{folder / Path(module).expanduser()}:{inner}" if colon and _is_file(module) else name


def relative(name: str, folder: Path) -> str:
    """Return a path as it is written in a file of that folder."""
    module, colon, inner = name.rpartition(":")
    if not colon or not _is_file(module):
        return name
    file, start = Path(module).expanduser().resolve(), folder.resolve()
    try:
        return f"{Path(os.path.relpath(file, start)).as_posix()}:{inner}"
    except ValueError:  # on another drive of Windows
        return f"{file}:{inner}"


def sha256(name: str) -> str | None:
    """Return the SHA-256 of the file that a path names; None if there is none."""
    module = name.rpartition(":")[0]
    if _is_file(module):
        file = Path(module).expanduser()
    else:
        try:
            spec = importlib.util.find_spec(module)
        except Exception:  # a parent package that can't be imported; `load` says why
            return None
        file = Path(spec.origin if spec is not None and spec.origin else "")
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


@contextmanager
def closed(remedy: str) -> Iterator[None]:
    """Within this context nothing is imported, because a header names it; `remedy` says what to do instead."""
    token = _closed.set(remedy)
    try:
        yield
    finally:
        _closed.reset(token)


def load(name: str, key: str) -> Any:
    """Return the object that a path names; `key` is the setting or option that names it, for errors.

    Raises:
        ConfigError: there is no such file, module or object, or importing it failed.
    """
    module, _, inner = name.rpartition(":")
    where = f"{key} = {name!r}"
    if _closed.get():
        raise ConfigError(
            f"{where} is code that only the header of a run names, and so is not imported; {_closed.get()}"
        )
    if not module or not inner:
        raise ConfigError(f"{where} must be file.py:name or package.module:name")
    loaded = _from_file(module, where) if _is_file(module) else _from_package(module, where)
    if not hasattr(loaded, inner):
        public = [found for found in vars(loaded) if not found.startswith("_")]
        raise ConfigError(f"{where}: {module} has no {inner!r}; {suggestion(inner, public or ['nothing'])}")
    return getattr(loaded, inner)


def load_factory(name: str, key: str) -> Callable[..., Any]:
    """Return the callable that a path names."""
    found = load(name, key)
    if not callable(found):
        raise ConfigError(
            f"{key} = {name!r} is {type(found).__name__}, not a function; name a function that returns a function"
        )
    return found  # type: ignore[no-any-return]


def place_of(error: BaseException, file: str | None) -> str:
    """Say what went wrong in a user's code, and in which line of the file."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == file else (lines or [None])[-1]
    return text if line is None or isinstance(error, SyntaxError) else f"{text} (line {line})"


def _is_file(module: str) -> bool:
    return module.endswith(".py") or "/" in module or os.sep in module


def _from_file(module: str, where: str) -> ModuleType:
    path = Path(module).expanduser().resolve()
    try:
        about = path.stat()
    except OSError:
        raise ConfigError(
            f"{where}: there is no file {path}; a path is relative to the folder of its config file, or with --set and "
            "in Python to the working directory"
        ) from None
    version = (about.st_mtime_ns, about.st_size)
    if path in _loaded and _loaded[path][0] == version:
        return _loaded[path][1]
    name = f"{MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"{where}: {path} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that the file finds its neighbours and hides nothing
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    try:
        spec.loader.exec_module(made)
    except Exception as error:  # a user's code may raise anything
        del sys.modules[name]
        raise _unimportable(where, module, error, str(path)) from error
    _loaded[path] = (version, made)
    return made


def _from_package(module: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # a module that this one imports
            raise _unimportable(where, module, error, None) from error
        raise ConfigError(
            f"{where}: no module named {module!r} is installed; for a file write file.py:name, relative to the folder "
            "of its config file"
        ) from None
    except Exception as error:  # a user's code may raise anything
        raise _unimportable(where, module, error, None) from error


def _unimportable(where: str, module: str, error: Exception, file: str | None) -> ConfigError:
    said = str(error) if isinstance(error, Cyber0Error) else place_of(error, file)
    return ConfigError(f"{where}: {module} can't be imported: {said}")
