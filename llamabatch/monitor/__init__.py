"""Monitoring of engines: snapshots at an interval, the machine, energy, a file for Prometheus, `llamabatch top`.

Imports `client` and the packages below it.
"""

from llamabatch.monitor.energy import EnergyMeter as EnergyMeter
from llamabatch.monitor.gpu import GpuSample as GpuSample
from llamabatch.monitor.host import MachineSample as MachineSample
from llamabatch.monitor.monitor import Monitor as Monitor
from llamabatch.monitor.prometheus import MetricsFile as MetricsFile
from llamabatch.monitor.snapshot import Snapshot as Snapshot
