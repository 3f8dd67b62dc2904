"""The figures of this machine, for the file that `cyber0 bench` compares with (src/cyber0/bench/machines.json).

    python benchmarks/machine.py                                       the processor
    python benchmarks/machine.py --device cuda --file machines.json    a GPU; written to another file
    python benchmarks/machine.py --name "two cores of an AMD EPYC"     another name than the hardware's own

What the file holds of other machines stays. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cyber0.bench import figures, machines
from cyber0.kernels.memory import keep_freed_memory

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--name", default="", help="what the machine is called in the table")
    parser.add_argument("--file", type=Path, default=machines.OURS, help="where the figures are written")
    arguments = parser.parse_args()
    keep_freed_memory()  # as the command line does
    found = []
    for figure in figures.measure(arguments.device, figures.shapes_for(arguments.device)):
        print(f"{figure.name}: {figure.value:.4g} {figure.unit}", flush=True)
        found.append(figure)
    machine = machines.this_machine(arguments.device, found, arguments.name)
    arguments.file.write_text(machines.text_of(machines.replaced(machines.load(), machine)), encoding="utf-8")
