"""What the files of a run's folder are called; scripts rely on these names."""

from __future__ import annotations

CONFIG, WEIGHTS, LEDGER = "config.toml", "w0.safetensors", "ledger.bin"
STATE, REPORTS = "state.safetensors", "reports.bin"
METRICS, CLIENTS, PARTITION = "metrics.csv", "clients.csv", "partition.csv"
SUMMARY, REPORT, DIAGNOSTICS = "summary.json", "report.html", "diagnostics.json"
SERVED = "served.json"
PLOTS, TENSORBOARD = "plots", "tensorboard"
