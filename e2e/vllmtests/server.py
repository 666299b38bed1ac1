"""RemoteOpenAIServer of vLLM's tests, as `xpyd up` with the model of the run.

It is tests/utils.py there: what the model is called and what a server is are replaced, nothing else.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import tempfile
import threading

import anthropic
import openai
import pytest

SERVE_SECONDS = 120
SERVERS = itertools.count()


def next_port():
    """XPYD_PORT and up, a server each: a file may have several at once. Without it, any that is free."""
    first = int(os.environ.get("XPYD_PORT", 0))
    return first and first + next(SERVERS) % 50



# vLLM's arguments that mean something here, and what xpyd calls them.
VALUED = {
    "--max-model-len": "--max-model-len",
    "--tool-call-parser": "--tool-parser",
    "--reasoning-parser": "--reasoning-parser",
    "--served-model-name": "--served-name",
    "--max-logprobs": "--max-logprobs",
}
SWITCHES = {
    "--trust-request-chat-template": "--trust-request-chat-template",
    "--return-tokens-as-token-ids": "--return-tokens-as-token-ids",
    "--enable-force-include-usage": "--force-include-usage",
    "--enable-per-request-metrics": "--per-request-metrics",
}
SETTINGS = {"--api-key": "api_keys", "--root-path": "root_path"}  # keys of the configuration


def translate(model, args):
    # A small model may not end its answer before the context does. So 1024 tokens are enough where the case says
    # nothing, and XPYD_MAX_MODEL_LEN bounds what it says: most cases of Responses have 18192.
    out = {"--served-name": model, "--tool-parser": "none", "--reasoning-parser": "none", "--max-model-len": "1024"}
    for i, arg in enumerate(args):
        name, _, value = arg.partition("=")
        name = name.replace("_", "-")
        if name in VALUED:
            out[VALUED[name]] = value or args[i + 1]
        elif name in SWITCHES:
            out[SWITCHES[name]] = None
    out["--max-model-len"] = str(min(int(out["--max-model-len"]), int(os.environ.get("XPYD_MAX_MODEL_LEN", 1 << 20))))
    flags = []
    for name, value in out.items():
        flags += [name] if value is None else [name, value]
    return flags


def settings(args, env):
    """The configuration's keys for those of vLLM's arguments that are no flags of xpyd's, as JSON values."""
    out = {"kv_memory": "1GiB"}  # for whole contexts of 8192 tokens
    given = {SETTINGS[name]: value for name, value in zip(args, args[1:]) if name in SETTINGS}
    if key := given.pop("api_keys", (env or {}).get("VLLM_API_KEY")):
        out["api_keys"] = [key]
    return {**out, **given}


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(self, model, vllm_serve_args, *, env_dict=None, seed=0, auto_port=True, max_wait_seconds=None, override_hf_configs=None):
        self.show_hidden_metrics = any(a.startswith("--show-hidden-metrics-for-version") for a in vllm_serve_args)
        self.data = tempfile.TemporaryDirectory(prefix="xpyd-vllmtests-")
        flags = translate(model, vllm_serve_args)
        config = os.path.join(self.data.name, "up.yaml")
        with open(config, "w") as f:
            json.dump(settings(vllm_serve_args, env_dict), f)  # which is YAML too
        self.proc = subprocess.Popen(
            [os.environ["XPYD"], "up", "--config", config, "--model", os.environ["XPYD_MODEL"], "--listen", f"127.0.0.1:{next_port()}",
             "--admin", "127.0.0.1:0", "--data", os.path.join(self.data.name, "data"), *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={k: v for k, v in os.environ.items() if not k.startswith("XPYD")})
        self.url_root, said = None, []
        ready = threading.Event()

        def read():
            for line in self.proc.stdout:
                said.append(line)
                if m := re.match(r"ready (http\S+)", line):
                    self.url_root = m.group(1)
                    ready.set()
            ready.set()

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        ready.wait(max_wait_seconds or SERVE_SECONDS)
        if self.url_root is None:
            self.__exit__()
            raise RuntimeError("xpyd up is not ready: " + "".join(said))
        self.host, port = self.url_root.removeprefix("http://").rsplit(":", 1)
        self.port = int(port)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.proc.send_signal(signal.SIGINT)
        try:
            self.proc.wait(20)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
        self.reader.join()
        self.data.cleanup()

    def decode_url(self):
        """The decode worker's address: vLLM's metrics are an engine's, and a router has its own."""
        status = subprocess.run([os.environ["XPYD"], "status", "--json", "--data", os.path.join(self.data.name, "data")], check=True, capture_output=True, timeout=30)
        return next(i["url"] for i in json.loads(status.stdout)["instances"] if i["role"] == "decode")

    def url_for(self, *parts):
        if parts == ("metrics",):
            return self.decode_url() + "/metrics"
        return self.url_root + "/" + "/".join(parts)

    def get_client(self, **kwargs):
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 400, **kwargs})

    def get_async_client(self, **kwargs):
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 400, **kwargs})

    def get_client_anthropic(self, **kwargs):
        return anthropic.Anthropic(base_url=self.url_for(), api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 400, **kwargs})

    def get_async_client_anthropic(self, **kwargs):
        return anthropic.AsyncAnthropic(base_url=self.url_for(), api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 400, **kwargs})


class RemoteLaunchRenderServer(RemoteOpenAIServer):
    pass


def multi_gpu_only(**_):
    return pytest.mark.skip(reason="several GPUs")


def requires_fp8(f):
    return pytest.mark.skip(reason="FP8")(f)


ROCM_EXTRA_ARGS, ROCM_ENV_OVERRIDES = [], {}
