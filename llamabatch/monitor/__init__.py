"""Watching engines: snapshots every so often, the machine beside them, a file for Prometheus, `llamabatch top`."""

from llamabatch.monitor.energy import EnergyMeter as EnergyMeter
from llamabatch.monitor.gpu import GpuSample as GpuSample
from llamabatch.monitor.host import MachineSample as MachineSample
from llamabatch.monitor.monitor import Monitor as Monitor
from llamabatch.monitor.prometheus import MetricsFile as MetricsFile
from llamabatch.monitor.snapshot import Snapshot as Snapshot
