"""A few steps under torch's profiler: where the time of a step goes."""

import logging
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerAction, profile, schedule

from polarlm.parallel import Device

_SKIPPED, _WARMUP = 2, 1  # steps: the first ones allocate and compile, and the profiler itself needs one to get ready
_ROWS = 30

_log = logging.getLogger("polarlm.train")


class Profile:
    """Profiles some early steps of a run on one rank, and writes into `profile/` of its folder:

    `trace.json`, which ui.perfetto.dev and chrome://tracing open; `operations.txt`, the costliest operations; and
    where the device records its memory, `memory.pickle` for pytorch.org/memory_viz.
    """

    def __init__(self, steps: int, run_folder: Path, device: Device, say: Callable[[str], None]) -> None:
        """
        Args:
            steps: how many to profile; 0 is none.
            say: how the person in front of the terminal hears that it is written.
        """
        self._folder, self._device, self._say = run_folder / "profile", device, say
        self._profiler = None
        if steps:
            turns = schedule(skip_first=_SKIPPED, wait=0, warmup=_WARMUP, active=steps, repeat=1)
            self._profiler = profile(schedule=turns, on_trace_ready=self._write, profile_memory=True)

    def __enter__(self) -> "Profile":
        if self._profiler:
            self._profiler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Write what there is of a run that ends sooner."""
        if self._profiler is None:
            return
        self._profiler.stop()
        if not (self._folder / "trace.json").exists():
            _log.warning("log.profile: nothing to see, the run ended within its first %d steps", _SKIPPED + _WARMUP)

    def step(self) -> None:
        """Tell that a step has been taken."""
        if self._profiler is None:
            return
        self._profiler.step()
        if self._profiler.current_action == ProfilerAction.WARMUP:
            self._device.record_memory()

    def _write(self, profiler: profile) -> None:
        self._folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / "trace.json"))
        on_device = self._device.torch.type
        table = profiler.key_averages().table(sort_by=f"self_{on_device}_time_total", row_limit=_ROWS)
        (self._folder / "operations.txt").write_text(table + "\n", encoding="utf-8")
        self._device.write_memory(self._folder / "memory.pickle")
        self._say(f"profiled; {self._folder}/trace.json opens in ui.perfetto.dev, operations.txt has the costliest")
