"""
Start the engine as it is, generate, and say what the device has left.

    cd examples && python -m classic_engine
"""

import torch

from classic_engine.engine import ClassicEngine
from classic_engine.model import Config

engine = ClassicEngine(Config.large() if torch.cuda.is_available() else Config())
engine.start()
print(engine.generate([[1, 2, 3], [5, 8]]))
print(f"{engine.kv.shape[2]} KV blocks, {len(engine.graphs)} graphs")
if engine.place.type == "cuda":
    engine.profile()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    requested = int(total * engine.config.utilization)
    print(f"requested {requested >> 20} MiB, in use {(total - free) >> 20} MiB, free {free >> 20} of {total >> 20} MiB")
