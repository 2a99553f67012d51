"""List the machines PolarLM knows, or show one of them; your own go into ~/.config/polarlm/sites.yaml.

polarlm sites                 all of them, and which this is
polarlm sites polaris         all of one, as it could stand in your own file
"""

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarlm.launch import Site


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `NAME`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of the list")


def run(arguments: argparse.Namespace) -> None:
    """Print the table, or one entry."""
    from polarlm.launch import find_allocation, known_sites, recognise, site_named

    if arguments.name:
        print(_show(site_named(arguments.name)), end="")
        return
    here = recognise(find_allocation(os.environ).hosts[0].address, os.environ)
    rows = [("name", "machine", "hosts", "scheduler", "launcher", "devices a node")]
    for site in known_sites().values():
        devices = f"{site.devices_per_node} x {site.device}" if site.devices_per_node else ""
        hosts = " ".join(site.hosts)
        rows.append((site.name, site.title, hosts, site.scheduler or "", site.launcher or "", devices))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print(f"\nthis is {here.name}" if here else "\nthis is none of them")


def _show(site: "Site") -> str:
    from dataclasses import asdict

    import yaml

    values = {key: value for key, value in asdict(site).items() if value and key != "name"}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return yaml.safe_dump({site.name: plain}, sort_keys=False, width=100)
