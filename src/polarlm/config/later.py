"""Names that a package hands out and that are imported when they are first asked for.

A launcher runs on every node and is to be there at once, without the libraries that most of a package's names need.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that does so (PEP 562).

    Args:
        package: its name.
        names: by module within it, the names to take from there, with spaces between them.
    """
    homes = {name: f"{package}.{module}" for module, each in names.items() for name in each.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return get
