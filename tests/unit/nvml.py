"""A stand-in for the module pynvml and the driver behind it: machines that run tests have no GPU."""

import sys
from types import ModuleType, SimpleNamespace


class Card(SimpleNamespace):
    """A GPU, or a MIG slice of the GPU `card`. The driver doesn't support values that are None."""

    def __init__(self, number, parts=(), **values):
        defaults = {"uuid": f"GPU-{number}234", "name": "NVIDIA H100", "bus_id": f"00000000:{number}B:00.0"}
        figures = {"millijoules": 0, "mhz": 1980, "max_mhz": 1980, "reasons": 0, "celsius": 50, "pids": []}
        states = {"parts": parts, "is_split": bool(parts), "is_denied": False, "is_persistent": True, "card": self}
        super().__init__(**{**defaults, **figures, **states, **values})
        for part in parts:
            part.card = self


class Nvml(ModuleType):
    """The module with some cards; `error`: message of `nvmlInit`, `cuda`: CUDA version of the driver."""

    class NVMLError(Exception):
        pass

    NVML_DEVICE_MIG_ENABLE, NVML_FEATURE_ENABLED, NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 1, 1, 0
    nvmlClocksThrottleReasonSwThermalSlowdown, nvmlClocksThrottleReasonHwThermalSlowdown = 0x20, 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self, *cards, error="", driver="580.65.06", cuda=13000):
        super().__init__("pynvml")
        self.cards, self.error, self.driver, self.cuda, self.num_open = cards, error, driver, cuda, 0

    def _supported(self, value):
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlInit(self):
        if self.error:
            raise self.NVMLError(self.error)
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self):
        return self.cuda

    def nvmlDeviceGetCount(self):
        assert self.num_open
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.cards[index].is_denied:
            raise self.NVMLError("Insufficient Permissions")
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.num_open
        devices = [device for card in self.cards for device in (card, *card.parts)]
        matches = [device for device in devices if device.uuid == uuid]
        return self._supported(matches[0] if matches else None)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part):
        return part.card

    def nvmlDeviceIsMigDeviceHandle(self, device):
        return int(device.card is not device)

    def nvmlDeviceGetUUID(self, device):
        return device.uuid

    def nvmlDeviceGetName(self, device):
        return device.name

    def nvmlDeviceGetPciInfo(self, device):
        return SimpleNamespace(busId=device.bus_id)

    def nvmlDeviceGetMigMode(self, device):
        return [int(self._supported(device.is_split)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, device):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        return self._supported(dict(enumerate(device.parts)).get(index))

    def nvmlDeviceGetPersistenceMode(self, device):
        return int(self._supported(device.is_persistent))

    def _of_card(self, device, name):
        return self._supported(getattr(device, name) if device.card is device else None)

    def nvmlDeviceGetTotalEnergyConsumption(self, device):
        return self._of_card(device, "millijoules")

    def nvmlDeviceGetClockInfo(self, device, kind):
        assert kind == self.NVML_CLOCK_SM
        return self._of_card(device, "mhz")

    def nvmlDeviceGetMaxClockInfo(self, device, kind):
        assert kind == self.NVML_CLOCK_SM
        return self._of_card(device, "max_mhz")

    def nvmlDeviceGetCurrentClocksEventReasons(self, device):
        if int(self.driver.partition(".")[0]) < 535:
            raise self.NVMLError("Function Not Found")
        return self.nvmlDeviceGetCurrentClocksThrottleReasons(device)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device):
        return self._of_card(device, "reasons")

    def nvmlDeviceGetTemperature(self, device, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._of_card(device, "celsius")

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        return [SimpleNamespace(pid=pid) for pid in self._supported(device.pids)]


def install(monkeypatch, *cards, **state):
    """Make `import pynvml` return the stand-in."""
    module = Nvml(*cards, **state)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module
