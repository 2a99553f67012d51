"""The run as typed values, and where each value comes from.

`RunConfig` and its sections are the contract with the user; `load_run` builds one from a YAML file, the deck's
environment variables and flags, and stops with one line a fault before anything starts.
"""

from typing import TYPE_CHECKING

from polarlm.config.errors import UserError, one_line
from polarlm.config.files import check_inside, leads_outside, names_file, parse_json, read_bytes, read_json
from polarlm.config.later import later

if TYPE_CHECKING:
    from polarlm.config.layout import default_name, sequence_unit
    from polarlm.config.load import (
        LoadedRun,
        check_preset,
        dump_run,
        field_paths,
        load_run,
        load_run_folder,
        run_of,
        with_tokenizer,
    )
    from polarlm.config.model import ModelConfig, RopeScaling
    from polarlm.config.placement import Place, places, samples_at, stages_at, tokens_at
    from polarlm.config.presets import PRESETS, known_presets
    from polarlm.config.record import Record
    from polarlm.config.resume import check_same_run
    from polarlm.config.run import (
        CheckpointConfig,
        DataConfig,
        LogConfig,
        LossScaleConfig,
        OptimizerConfig,
        ParallelConfig,
        RunConfig,
        ScheduleConfig,
        TrainConfig,
    )
    from polarlm.config.stages import SPLIT_BACKWARD, Stage, pipeline_stages
else:
    # These bring the libraries of validation with them.
    __getattr__ = later(
        __name__,
        {
            "layout": "default_name sequence_unit",
            "load": "LoadedRun check_preset dump_run field_paths load_run load_run_folder run_of with_tokenizer",
            "model": "ModelConfig RopeScaling",
            "placement": "Place places samples_at stages_at tokens_at",
            "presets": "PRESETS known_presets",
            "record": "Record",
            "resume": "check_same_run",
            "run": "CheckpointConfig DataConfig LogConfig LossScaleConfig OptimizerConfig ParallelConfig RunConfig "
            "ScheduleConfig TrainConfig",
            "stages": "SPLIT_BACKWARD Stage pipeline_stages",
        },
    )

__all__ = [
    "PRESETS",
    "SPLIT_BACKWARD",
    "CheckpointConfig",
    "DataConfig",
    "LoadedRun",
    "LogConfig",
    "LossScaleConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Place",
    "Record",
    "RopeScaling",
    "RunConfig",
    "ScheduleConfig",
    "Stage",
    "TrainConfig",
    "UserError",
    "check_inside",
    "check_preset",
    "check_same_run",
    "default_name",
    "dump_run",
    "field_paths",
    "known_presets",
    "leads_outside",
    "load_run",
    "load_run_folder",
    "names_file",
    "one_line",
    "parse_json",
    "pipeline_stages",
    "places",
    "read_bytes",
    "read_json",
    "run_of",
    "samples_at",
    "sequence_unit",
    "stages_at",
    "tokens_at",
    "with_tokenizer",
]
