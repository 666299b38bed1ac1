"""Python loads this at its start where scripts/real-vllm says so: vLLM's Mooncake
connector asks PyTorch for the current accelerator, which PyTorch's build with CUDA
answers with "Found no NVIDIA driver". Here it is 0, which CPUs ignore."""

import importlib.abc
import importlib.util
import sys


class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.accelerator":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.current_device_index = lambda: 0

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Patch())
