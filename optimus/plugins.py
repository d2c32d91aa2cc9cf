"""The library's tables of techniques, and the plugins that add rows to these tables.

A `Table` maps names to rows, such as update rules or model families. A plugin is a Python module with a list `ROWS` of
rows, of the same classes as the library's own rows. `load_plugins` imports plugins and adds their rows to the tables.

A checkpoint or a folder of data names its plugins, but reading the checkpoint or the data imports no plugin.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import PydanticKnownError, core_schema

from optimus.errors import UserError, nearest

GROUP = "optimus.plugins"
"""Group of entry points by which an installed package gives its plugins short names."""

T = TypeVar("T")


class Imported(Mapping[str, T]):
    """Rows that are imported on first use. `homes` maps each name to `module:attribute`."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self._homes[name].partition(":")
        row: T = getattr(import_module(module), attribute)
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


class Row(Protocol):
    """A row of a `Table`, such as an update rule or a model family."""

    @property
    def name(self) -> str:
        """The name by which configurations choose the row."""


R = TypeVar("R", bound=Row)


class Table(Mapping[str, R]):
    """Rows by name: the library's own rows, and the rows of the plugins that this process has loaded.

    `what` names a row in messages ("update rule"). `kind` is the class of the rows. `find` returns the library's own rows;
    the table calls `find` at the first use. `check` raises `ValueError` for an invalid row of a plugin.
    """

    def __init__(
        self, what: str, kind: type[R], find: Callable[[], Mapping[str, R]], check: Callable[[R], None] | None = None
    ) -> None:
        self.what, self.kind, self.check, self._find = what, kind, check, cache(find)
        self._added: dict[str, R] = {}
        _TABLES.append(self)

    def __getitem__(self, name: str) -> R:
        return self._added[name] if name in self._added else self._find()[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._find()
        yield from self._added

    def __len__(self) -> int:
        return len(self._find()) + len(self._added)

    def named(self, name: str) -> R:
        """Returns the row `name`. Raises `UserError`, which suggests a valid name, if there is no such row."""
        if name not in self:
            raise UserError(f"{self.what} '{name}' does not exist; {nearest(name, self)}")
        return self[name]

    def extend(self, rows: Mapping[str, R]) -> None:
        """Adds rows by name. Replaces earlier added rows of the same name."""
        self._added.update(rows)


_TABLES: list[Table[Any]] = []


@dataclass(frozen=True, eq=False)
class NameIn:
    """Restricts a string of the configuration to the names of a table, as `Literal` does for fixed names."""

    table: Mapping[str, Any]
    object_of: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, name: str) -> str:
        if name not in self.table:
            *most, last = map(repr, self.table)
            expected = f"{', '.join(most)} or {last}" if most else last
            if self.object_of is not None and "." in name:
                expected += f", or the rule that is the argument `{self.object_of}` of `optimus.train`"
            raise PydanticKnownError("literal_error", {"expected": expected})
        return name


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin, as run folders and checkpoints record it."""

    name: str  # as the user names it: an entry point or a module
    module: str
    version: str | None  # of the installed package that contains the module
    sha256: str  # of the module's file, or of all Python files of a package

    def __str__(self) -> str:
        return f"{self.name} {self.version}" if self.version else self.name


_LOADED: dict[str, Plugin] = {}


def loaded_plugins() -> list[Plugin]:
    """Returns the plugins that this process has loaded, in the order of loading."""
    return [*_LOADED.values()]


def load_plugins(names: Sequence[str] | None, where: str = "plugins") -> list[Plugin]:
    """Imports the named plugins that this process has not loaded yet, and adds their rows to the tables. Returns all
    named plugins.

    A name is that of an entry point in the group `optimus.plugins`, or of a module in the current folder, on PYTHONPATH or
    installed. `where` is the origin of the names, for messages.

    Raises `UserError` for a plugin that cannot be imported, that has no valid `ROWS`, or whose row has the name of
    another row in the same table.
    """
    names = () if names is None else names
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where} is {names!r}: give a list of modules or entry points, such as [my_package.models]")
    return [_LOADED.get(name) or _load(name, f"{where}: {name}") for name in names]


def imported(module: str, where: str, cure: str) -> Any:
    """Imports `module` from the current folder, PYTHONPATH or the installed packages.

    Raises `UserError` for a module that cannot be imported; the message begins with `where` and contains `cure`.
    """
    if os.getcwd() not in sys.path:  # the search path of a command lacks the current folder
        sys.path.append(os.getcwd())
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UserError(
            f"{where} cannot be imported ({said}): {cure}, of a module in {os.getcwd()}, on PYTHONPATH or installed"
        ) from error


def naming_missing_plugins(error: UserError, recorded: Sequence[str]) -> UserError:
    """Returns `error` with the names of the `recorded` plugins that are not loaded, since a missing plugin may be the
    cause."""
    missing = [name for name in recorded if name not in {*_LOADED, *(each.module for each in loaded_plugins())}]
    if not missing:
        return error
    names = " and ".join(missing)
    return UserError(
        f"{error} (written with the plugin {names}, which is loaded only if named: add `plugins={missing[0]}`)"
    )


def changed_plugins(recorded: Iterable[Mapping[str, Any]], where: str) -> list[str]:
    """Returns a line for each loaded plugin whose files differ from the files `recorded` in `where`."""
    now = {plugin.module: plugin for plugin in loaded_plugins()}
    lines = []
    for each in recorded:
        plugin = now.get(str(each.get("module")))
        if plugin is not None and plugin.sha256 != each.get("sha256"):
            versions = (
                "" if each.get("version") == plugin.version else f" ({each.get('version')}, now {plugin.version})"
            )
            lines.append(f"the plugin {plugin.name} has changed since {where} was written{versions}")
    return lines


def note_changed_plugins(recorded: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Prints `changed_plugins` of the checkpoint `path` on standard error."""
    for line in changed_plugins(recorded, str(path)):
        print(line, file=sys.stderr)


def _load(name: str, where: str) -> Plugin:
    entries = {entry.name: entry.value for entry in metadata.entry_points(group=GROUP)}
    module_name = entries.get(name, name)
    for plugin in loaded_plugins():
        if plugin.module == module_name:  # loaded by another name
            return plugin
    module = imported(module_name, where, "name an entry point of the group optimus.plugins, or a module")
    rows = getattr(module, "ROWS", None)
    if not isinstance(rows, list | tuple):
        raise UserError(f"{where}: {module_name} has no list `ROWS`: a plugin lists the rows that it adds there")
    added: dict[str, dict[str, Any]] = {}
    for row in rows:
        table = _table_of(row, where)
        if row.name in table or row.name in added.setdefault(table.what, {}):
            raise UserError(f"{where}: there is a {table.what} '{row.name}' already: give this one another name")
        _check(table, row, where)
        added[table.what][row.name] = row
    for table in _TABLES:
        table.extend(added.get(table.what, {}))
    plugin = _LOADED[name] = Plugin(name, module_name, _version(module_name), _digest(module))
    return plugin


def _check(table: Table[Any], row: Any, where: str) -> None:
    """Raises `UserError` if the check of the table raises an error for the row."""
    if table.check is None:
        return
    try:
        table.check(row)
    except ValueError as error:
        raise UserError(f"{where}: {table.what}: {error}") from None
    except Exception as error:
        raise UserError(f"{where}: {table.what} '{row.name}': {type(error).__name__}: {error}") from error


def _table_of(row: object, where: str) -> Table[Any]:
    for table in _TABLES:
        if isinstance(row, table.kind):
            return table
    raise UserError(f"{where}: {row!r} in `ROWS` is no row of a table: list rows of the classes in `optimus.extend`")


def _version(module: str) -> str | None:
    packages = metadata.packages_distributions().get(module.partition(".")[0], ())
    return metadata.version(packages[0]) if packages else None


def _digest(module: Any) -> str:
    """Returns the SHA-256 of a module's file, or of the names and contents of all Python files of a package."""
    file = Path(module.__file__)
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    for each in files:
        digest.update(each.relative_to(file.parent).as_posix().encode() + b"\0" + each.read_bytes() + b"\0")
    return digest.hexdigest()
