"""What vLLM's tests import of vLLM and torch, for cases that only speak HTTP.

Any module below `vllm` can be imported; what a case would have to use of it is not there. Only a few
helpers do something: the tokenizer, the platform, a free port.
"""

import importlib.abc
import importlib.machinery
import os
import socket
import sys
import types
from unittest.mock import MagicMock

import numpy as np

FAKED = ("vllm", "torch")
VERSION = "0.33.0"


class Absent(type):
    """A class of vLLM's that is not here: it can be named, subclassed and mocked, not used."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")

    def __call__(cls, *args, **kwargs):
        return MagicMock()  # files make such objects while they are imported


def absent(name):
    return Absent(name, (Exception,), {"__doc__": "inside vLLM"})


def tokenizer(*_, **__):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["XPYD_TOKENIZER"])


def open_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Config:
    """vLLM's ModelConfig, as far as tests ask for a vocabulary's size."""

    def __init__(self, *_, **__):
        pass

    def get_vocab_size(self):
        return len(tokenizer())


PRESENT = {
    "vllm.tokenizers": {"get_tokenizer": tokenizer},
    "vllm.config": {"ModelConfig": Config},
    "vllm.platforms": {"current_platform": types.SimpleNamespace(
        is_rocm=lambda: False, is_cuda=lambda: False, is_xpu=lambda: False, is_cpu=lambda: True, is_tpu=lambda: False,
        device_count=lambda: 0, supports_fp8=lambda: False)},
    "vllm.utils.network_utils": {"get_open_port": open_port},
    "vllm.version": {"__version__": VERSION, "_prev_minor_version": lambda: "0.32"},
    "vllm.envs": {"VLLM_USE_RUST_FRONTEND": False},
    "vllm": {"__version__": VERSION},
    "torch": {"iinfo": np.iinfo, "long": np.int64},
}


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in PRESENT:
            return importlib.import_module(f"{self.__name__}.{name}")
        return absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FAKED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        vars(module).update(PRESENT.get(module.__name__, {}))


def install():
    """Has vLLM's modules be those here, and any model's tokenizer the one of the run's."""
    sys.meta_path.insert(0, Finder())
    from transformers import AutoTokenizer

    load = AutoTokenizer.from_pretrained
    AutoTokenizer.from_pretrained = lambda *_, **__: load(os.environ["XPYD_TOKENIZER"])
