"""Energy and GPUs from fake machines: each source is optional, counters wrap, and nothing is printed."""

from types import SimpleNamespace

import pytest

from llamabatch.monitor import energy
from llamabatch.monitor.energy import EnergyMeter
from llamabatch.monitor.gpu import Gpus, GpuSample
from tests.waiting import until


class FakeNvml:
    """Two GPUs. Functions in `missing` fail as NVML's functions do on a GPU that does not support them."""

    def __init__(self, *missing: str, count: int = 2) -> None:
        self.missing, self.count, self.millijoules, self.ended = set(missing), count, 5000, False

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in object.__getattribute__(self, "missing"):
            raise RuntimeError("Not Supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        self.ended = True

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"Card" if handle else "Card"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{'ab'[handle] * 8}"

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=40 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=3 << 30, total=8 << 30)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 70_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self.millijoules


def zone(folder, name: str, energy_uj: int | str, range_uj: int | None = 10_000_000):
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    if range_uj is not None:
        (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return folder / "energy_uj"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_packages_and_their_memory_add_up_and_wrap(tmp_path):
    package = zone(tmp_path / "intel-rapl:0", "package-0", 9_000_000)
    zone(tmp_path / "intel-rapl:0:0", "core", 1_000)
    dram = zone(tmp_path / "intel-rapl:0:1", "dram", 1_000_000)
    zone(tmp_path / "intel-rapl:1", "psys", 77)
    zone(tmp_path / "intel-rapl-mmio:0", "package-0", 9_000_000)  # a second counter of the same package
    with EnergyMeter(powercap=tmp_path, gpus=False) as meter:
        assert meter.sources == ("package-0", "dram-0")
        assert meter.read() == 0
        package.write_text("500000")  # the counter began again at 10 J
        dram.write_text("3000000")
        assert meter.read() == pytest.approx(1.5 + 2.0)
        package.write_text("700000")
        assert meter.by_source() == pytest.approx({"package-0": 1.7, "dram-0": 2.0})
        package.unlink()  # a counter can disappear while it is read
        assert meter.stop() == pytest.approx(3.7)


def test_a_counter_without_a_range_that_falls_was_set_back(tmp_path):
    package = zone(tmp_path / "intel-rapl:0", "package-0", 9_000_000, None)
    with EnergyMeter(powercap=tmp_path, gpus=False) as meter:
        package.write_text("9500000")
        assert meter.read() == pytest.approx(0.5)
        package.write_text("100")
        assert meter.read() == pytest.approx(0.5)


@pytest.mark.parametrize("broken", ["missing", "no permission", "no number", "empty"])
def test_what_cannot_be_read_is_none_without_a_word(tmp_path, broken, capfd, monkeypatch):
    if broken != "missing":
        path = zone(tmp_path / "intel-rapl:0", "package-0", {"no number": "x", "empty": ""}.get(broken, 5))
    if broken == "no permission":
        path.unlink()
        path.mkdir()  # root may read every file, but nobody can read a folder
    meter = EnergyMeter(powercap=tmp_path, gpus=False)
    with meter:
        assert (meter.sources, meter.read()) == ((), None)
    assert meter.stop() is None
    assert capfd.readouterr() == ("", "")


def test_a_thread_reads_so_that_no_wrap_is_missed(tmp_path, monkeypatch, begun):
    monkeypatch.setattr(energy, "_READ_EVERY_S", 0.01)
    package = zone(tmp_path / "intel-rapl:0", "package-0", 0)
    with EnergyMeter(powercap=tmp_path, gpus=False) as meter:
        assert len(begun.threads()) == 1
        for _ in range(4):  # 8 J each time; the counter wraps at 10 J
            seen = meter._counters[0]._sum
            package.write_text(str((int(package.read_text()) + 8_000_000) % 10_000_000))
            until(lambda seen=seen: meter._counters[0]._sum != seen)
        assert meter.read() == pytest.approx(32)
    assert not begun.threads()
    with EnergyMeter(powercap=tmp_path / "nothing", gpus=False):
        assert not begun.threads()


def test_gpus_count_their_energy(tmp_path):
    nvml = FakeNvml()
    with EnergyMeter(powercap=tmp_path, nvml=nvml) as meter:
        nvml.millijoules += 2500
        assert meter.read() == pytest.approx(5.0)
        assert meter.sources == ("GPU 0", "GPU 1")
    assert nvml.ended
    old = FakeNvml("nvmlDeviceGetTotalEnergyConsumption")
    with EnergyMeter(powercap=tmp_path, nvml=old) as meter:
        assert meter.read() is None


def test_what_a_gpu_tells():
    first, second = Gpus(FakeNvml()).sample()
    assert first == GpuSample(0, "Card", 40.0, 3 << 30, 8 << 30, 70.5)
    assert (second.index, second.name) == (1, "Card")
    silent = ("Name", "UtilizationRates", "MemoryInfo", "PowerUsage")
    assert Gpus(FakeNvml(*(f"nvmlDeviceGet{name}" for name in silent), count=1)).sample() == (GpuSample(0, "GPU"),)


@pytest.mark.parametrize("missing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_without_a_driver_there_are_no_gpus(missing):
    gpus = Gpus(FakeNvml(missing))
    assert (gpus.sample(), gpus.counters()) == ((), {})
    gpus.close()
    gpus.close()


@pytest.mark.parametrize(
    ("variable", "seen"),
    [("0", [0]), ("1,0", [0, 1]), ("", []), ("GPU-bbbb", [1]), ("GPU-aaaaaaaa, 1", [0, 1]), ("-1", []), ("7", [])],
)
def test_only_gpus_that_this_process_may_use(monkeypatch, variable, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert [gpu.index for gpu in Gpus(FakeNvml()).sample()] == seen
