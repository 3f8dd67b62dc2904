"""What a user brings: objects named by a path, `file.py:Name` or `package.module:Name`.

    clipped = load("my_rules.py:clipped", "aggregation.rule")

A file is found relative to the working directory; `config.load` turns the paths of a config file, which are relative to
its folder, into absolute ones. A run's folder keeps a path relative to itself, and a header only the file's name, for
its readers have other folders. Loading runs the user's code, so only what the user's own config or command line names
is loaded, never what a ledger's header names. Nor is a model or a data set downloaded because a header names it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from cyber0.config.suggestions import closest
from cyber0.errors import ConfigError, Cyber0Error

OWN = "own"
"""The name of a task that was given in Python and that no path leads to."""
MODULE = "cyber0_own_"
"""How the names of modules begin that were loaded from a file."""
_PATH = re.compile(r"(?P<place>.+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)", re.DOTALL)
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
MODEL, DATA = "model", "data"
"""What may be downloaded."""
_closed: ContextVar[str] = ContextVar("closed", default="")
_offline: ContextVar[frozenset[str]] = ContextVar("offline", default=frozenset())
_T = TypeVar("_T")


# Paths as text.


def is_path(name: str) -> bool:
    """Return whether a name is a path to an object, and not the name of something registered."""
    return _PATH.fullmatch(name) is not None


def is_own(task: str) -> bool:
    """Return whether a task of this name is a user's, not a built-in one."""
    return task == OWN or is_path(task)


def short(name: str) -> str:
    """Return a path without its folders: the same on every machine, for headers, titles and reports."""
    file, inner = _file_and_name(name)
    return f"{Path(file).name}:{inner}" if file else name


def object_name(name: str) -> str:
    """Return the object's name in lower case, for the name of a folder; a name that is not a path is unchanged."""
    return name.rpartition(":")[2].lower() if is_path(name) else name


def located(name: str, folder: Path) -> str:
    """Return a path that is relative to a folder with the absolute path of its file."""
    file, inner = _file_and_name(name)
    return f"{(folder / Path(file).expanduser()).resolve()}:{inner}" if file else name


def relative(name: str, folder: Path) -> str:
    """Return a path as it is written in a file of that folder."""
    file, inner = _file_and_name(name)
    if not file:
        return name
    whole = Path(file).expanduser().resolve()
    try:
        return f"{Path(os.path.relpath(whole, folder.resolve())).as_posix()}:{inner}"
    except ValueError:  # on another drive of Windows
        return f"{whole}:{inner}"


def name_of(kind: type) -> str:
    """Return the path that leads to a class, of a file with its folders; "own" if none does."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if "." in kind.__qualname__ or module is None:  # within a function, or in a module that is gone
        return OWN
    if kind.__module__ == "__main__" or kind.__module__.startswith(MODULE):
        return f"{Path(file).resolve()}:{kind.__qualname__}" if file and file.endswith(".py") else OWN
    return f"{kind.__module__}:{kind.__qualname__}"


def _file_and_name(name: str) -> tuple[str, str]:
    """Return the file and the object of a path; both empty where it names no file."""
    place, _, inner = name.rpartition(":")
    return (place, inner) if is_path(name) and place.endswith(".py") else ("", "")


# The file behind a path.


def sha256(name: str) -> str | None:
    """Return the SHA-256 of the file that a path names; None if there is none. Nothing is imported."""
    file = source(name)
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()


def source(name: str) -> Path | None:
    """Return the file that a path names; None if there is none. Nothing is imported."""
    if not is_path(name):
        return None
    file = _file_and_name(name)[0]
    found = Path(file).expanduser() if file else _module_file(name.rpartition(":")[0])
    return found if found is not None and found.is_file() else None


def _module_file(module: str) -> Path | None:
    """Return the file of a module; `importlib.util.find_spec` alone would import the packages that it is in."""
    _see(Path.cwd())
    first, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # a module without a spec, such as __main__
        return None
    full = first
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full = f"{full}.{part}"
        spec = PathFinder.find_spec(full, spec.submodule_search_locations)
    return Path(spec.origin) if spec is not None and spec.origin else None


# Importing it.


@contextmanager
def closed(remedy: str) -> Iterator[None]:
    """Within this context nothing is imported, because a header names it; `remedy` says what to do instead."""
    token = _closed.set(remedy)
    try:
        yield
    finally:
        _closed.reset(token)


@contextmanager
def offline(*kinds: str) -> Iterator[None]:
    """Within this context nothing of these kinds, MODEL or DATA, is downloaded, because a header names it."""
    token = _offline.set(_offline.get() | set(kinds))
    try:
        yield
    finally:
        _offline.reset(token)


def is_offline(kind: str) -> bool:
    """Return whether nothing of this kind may be downloaded now."""
    return kind in _offline.get()


def load(name: str, key: str) -> Any:
    """Return the object that a path names; `key` is the setting or option that names it, for errors.

    Raises:
        ConfigError: there is no such file, module or object, or importing it failed.
    """
    where = f"{key} = {short(name)!r}"
    if _closed.get():
        raise ConfigError(
            f"{where} is code that only the header of a run names, and so is not imported; {_closed.get()}"
        )
    if not is_path(name):
        raise ConfigError(f"{where} must be file.py:name or package.module:name")
    place, _, inner = name.rpartition(":")
    loaded = _from_file(place, where) if place.endswith(".py") else _from_package(place, where)
    if not hasattr(loaded, inner):
        raise _no_such_name(where, place, inner, vars(loaded))
    return getattr(loaded, inner)


def check(name: str, key: str) -> None:
    """Refuse a path that leads nowhere, as far as that can be checked without importing anything.

    Raises:
        ConfigError: there is no such file or module, it is no Python, or it never mentions the object's name.
    """
    where, (place, _, inner), file = f"{key} = {short(name)!r}", name.rpartition(":"), source(name)
    if file is None:
        raise _no_file(where, place) if place.endswith(".py") else _no_module(where, place)
    if file.suffix != ".py":
        return
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError) as error:
        raise _import_error(where, str(file), error) from error
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    imported = {node.asname or node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if inner not in defined | imported | bound and "*" not in imported:
        raise _no_such_name(where, place, inner, defined | imported | bound)


def load_factory(name: str, key: str) -> Callable[..., Any]:
    """Return the callable that a path names."""
    found = load(name, key)
    if not callable(found):
        raise ConfigError(
            f"{key} = {short(name)!r} is {type(found).__name__}, not a function; name a function that returns a "
            "function"
        )
    return found  # type: ignore[no-any-return]


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
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if "site-packages" not in f.filename and not f.filename.startswith((_PACKAGE, "<"))]  # fmt: skip
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def _from_file(file: str, where: str) -> ModuleType:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise _no_file(where, file)
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"{MODULE}{digest}_{path.stem}"
    if name in sys.modules:  # unchanged since it was loaded
        return sys.modules[name]
    _see(path.parent)
    _see(Path.cwd())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _import_error(where, str(path), error) from error
    return module


def _from_package(module: str, where: str) -> ModuleType:
    _see(Path.cwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # a module that this one imports
            raise _import_error(where, module, error) from error
        raise _no_module(where, error.name) from None
    except BaseException as error:
        raise _import_error(where, module, error) from error


def _no_file(where: str, file: str) -> ConfigError:
    return ConfigError(
        f"{where}: there is no file {Path(file).expanduser().resolve()}; a path is relative to the folder of its "
        "config file, or with --set and in Python to the working directory"
    )


def _no_module(where: str, module: str) -> ConfigError:
    return ConfigError(
        f"{where}: there is no module {module}; install it, run in the folder that holds it, or name its file as "
        "file.py:name"
    )


def _no_such_name(where: str, place: str, inner: str, names: Iterable[str]) -> ConfigError:
    near = closest(inner, [name for name in names if not name.startswith("_")])
    remedy = f"did you mean {near!r}?" if near else "check the name after the colon"
    return ConfigError(f"{where}: {place} has no {inner!r}; {remedy}")


def _import_error(where: str, place: str, error: BaseException) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return error
    reason = str(error) if isinstance(error, Cyber0Error) else described(error)
    return ConfigError(f"{where}: {place} can't be imported: {reason}")


def _see(folder: Path) -> None:
    """Make the modules of a folder importable, unless an installed one has the same name."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
