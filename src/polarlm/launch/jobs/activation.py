"""The lines of a job script that bring back what its user had: modules, the Python environment, variables.

Everything stands in the script itself; whatever is missing where it runs ends it with one line that says so.
"""

import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.machines.modules import load_lines, loaded_modules, site_modules
from polarlm.launch.machines.sites import Site

__all__ = ["module_lines", "python_lines", "variable_lines"]

# What training and its libraries look at, but for what a scheduler sets and what the lines for Python and modules set.
_WRITTEN = ("TZ", "http_proxy", "https_proxy", "no_proxy")
_WRITTEN_PREFIXES = (
    *("CCL_", "CUDA_", "FI_", "GLOO_", "HF_", "HIP_", "HSA_", "IBV_", "NCCL_", "OMP_", "POLARLM_", "PYTHON", "ROCR_"),
    *("TOKENIZERS_", "TORCH", "TRITON_", "WANDB_", "XDG_CONFIG", "ZE_"),
)
_OWN = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_SYSTEMS = ("/bin", "/usr/bin", "/usr/local/bin")  # before these a module puts its own programs, such as mpiexec
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def module_lines(environment: Mapping[str, str], site: Site | None) -> list[str]:
    """Load the modules that are loaded now, else the site's; no lines where there are neither."""
    modules, why = loaded_modules(environment, site), "The modules that were loaded where this was submitted."
    if not modules.names:
        modules = site_modules(environment, site)
        why = f"The modules that the site {site.name if site else ''} wants; none was loaded where this was submitted."
    return [f"# {why}", *load_lines(modules)] if modules.names else []


def python_lines(environment: Mapping[str, str]) -> list[str]:
    """The Python that runs now, put before any that a module brought, and printed."""
    lines = ["# The Python that submitted this, before any that a module brings."]
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"):
        if environment.get(name):
            lines.append(_export(name, environment[name]))
    lines += [
        f"python={shlex.quote(sys.executable)}",
        '[[ -x $python ]] || fail "there is no $python (is its file system there?)"',
    ]
    if str(Path(sys.executable).parent) not in _SYSTEMS:
        lines.append('export PATH="${python%/*}:$PATH"')
    return [*lines, 'echo "python: $python on $HOSTNAME"']


def variable_lines(environment: Mapping[str, str], in_config: Iterable[str]) -> list[str]:
    """The variables that training looks at and that are set now; secrets stay out of the file.

    Args:
        in_config: variables that have become fields of the run; set again, they would replace what flags said.
    """
    written = [name for name in environment if name in _WRITTEN or name.startswith(_WRITTEN_PREFIXES)]
    names = sorted(name for name in written if environment[name] and name not in _OWN)
    secret = [name for name in names if any(word in name.upper() for word in _SECRETS)]
    exports = [_export(name, environment[name]) for name in names if name not in secret and name not in in_config]
    lines = ["# Variables that were set where this was submitted.", *exports] if exports else []
    if secret:
        lines.append(f"# Set there, and not written down: {', '.join(secret)}")
    if in_config:
        lines += ["# In the run's config.yaml already.", f"unset {' '.join(sorted(in_config))}"]
    return lines


def _export(name: str, value: str) -> str:
    """
    Raises:
        UserError: a value that no line of a script can hold.
    """
    if "\0" in value:
        raise UserError(f"{name} in the environment holds a zero byte: unset it")
    return f"export {name}={shlex.quote(value)}"
