"""Config files: read, with settings replaced, and written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cyber0.config import toml
from cyber0.config.keys import SECTIONS, comment, settings, toml_value
from cyber0.config.overrides import apply
from cyber0.config.paths import located_tables, relative_tables
from cyber0.config.schema import Config, to_dict
from cyber0.errors import ConfigError


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file (none: the defaults), replace some settings by `section.key=value`, and check the result."""
    folder = Path.cwd() if path is None else Path(path).parent
    data = {} if path is None else located_tables(read_toml(Path(path)), folder)
    if "study" in data:
        raise ConfigError(f"{path} describes a study of many runs; run it by: cyber0 study {path}")
    return Config.from_dict(located_tables(apply(data, overrides), Path.cwd()))


def located(config: Config) -> Config:
    """Return the config with the absolute paths of the user's files; relative ones start at the working directory."""
    return Config.recorded(located_tables(to_dict(config), Path.cwd()))


def read_toml(path: Path, example: str = "examples/mnist.toml") -> dict[str, Any]:
    """Return the tables of a TOML file; `example` is what is pointed to where there is no such file."""
    try:
        return toml.parse(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        hint = f"; in cyber0's repository, {example} shows what one looks like"
        hint = hint if path.name != Path(example).name else f": the working directory is {Path.cwd()}"
        raise ConfigError(f"there is no config file {path}{hint}") from None
    except OSError as error:
        raise ConfigError(f"the config file {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path} {error}") from None


def to_toml(config: Config, folder: Path | None = None) -> str:
    """Write a config with every key and what it means; reading it back gives the same config.

    Written for a folder, paths of objects are relative to it.
    """
    if folder is not None:
        config = Config.recorded(relative_tables(to_dict(config), folder))
    lines: list[str] = []
    for name, section in (("", config), *((name, getattr(config, name)) for name in SECTIONS)):
        lines += ["", f"[{name}]"] if name else []
        for f in settings(type(section)):
            setting = f"{f.name} = {toml_value(getattr(section, f.name))}"
            lines.append(f"{setting:<31} # {comment(f)}")
    return "\n".join(lines) + "\n"
