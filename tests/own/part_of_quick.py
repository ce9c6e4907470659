"""A part of `mcbn-uci --preset quick`: the first split of one data set, with all settings of the preset."""

from dataclasses import replace

from batchbayes_papers.mcbn import uci
from batchbayes_papers.mcbn.uci import figures, notes, tables, units, work

__all__ = ["PRESETS", "figures", "notes", "tables", "units", "work"]

PRESETS = {"quick": replace(uci.PRESETS["quick"], datasets=("boston",), splits=1)}
