"""What all tests share: the CPU is made safe before torch is loaded, and hypothesis is repeatable."""

from plainvit import device

device.prepare()  # must come before torch is loaded

import hypothesis  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)  # for models this small a second thread only waits
hypothesis.settings.register_profile("plainvit", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("plainvit")
