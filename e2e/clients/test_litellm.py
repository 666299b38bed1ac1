"""LiteLLM, unmodified, against a model that thinks and calls tools: by OpenAI's chats and Responses, and by
Anthropic's Messages.

Run by scripts/clients more, which makes the model (caller.py), starts xpyd and sets XPYD_URL.
"""
import functools
import json
import os
import unittest
from typing import Literal

from pydantic import BaseModel, ConfigDict

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network
import litellm

litellm.suppress_debug_info = True
URL, MODEL = os.environ["XPYD_URL"], os.environ["XPYD_MODEL"]
ASK, ANSWER, THOUGHT = [{"role": "user", "content": "How warm is it?"}], "It is 21 degrees.", "\nOslo it is.\n"
TOOLS = [{"type": "function", "function": {"name": name, "description": "It tells.", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
         for name in ("weather", "clock")]
CALLS = [("weather", {"city": "Oslo", "days": 2}), ("clock", {})]
WAYS = {"openai/" + MODEL: URL + "/v1", "hosted_vllm/" + MODEL: URL + "/v1", "openai/responses/" + MODEL: URL + "/v1", "anthropic/" + MODEL: URL}


class Report(BaseModel):  # no free text in it: the model would never end that
    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    rain: bool


def calls(message):
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


class LiteLLM(unittest.TestCase):
    ways = [functools.partial(litellm.completion, model=model, api_base=base, api_key="unused", messages=ASK, max_tokens=400, temperature=0, num_retries=0, timeout=30)
            for model, base in WAYS.items()]

    def test_text(self):
        for ask in self.ways:
            whole = ask()
            self.assertEqual((whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.completion_tokens), (ANSWER, "stop", 3))
            self.assertEqual("".join(c.choices[0].delta.content or "" for c in ask(stream=True)), ANSWER)

    def test_tools(self):
        for ask in self.ways:
            first = ask(tools=TOOLS).choices[0].message
            self.assertEqual(calls(first), CALLS)
            if "/responses/" not in ask.keywords["model"]:  # of these it reads summaries alone
                self.assertEqual(first.reasoning_content, THOUGHT)
            results = [{"role": "tool", "tool_call_id": c.id, "content": "21"} for c in first.tool_calls]
            self.assertEqual(ask(tools=TOOLS, messages=[*ASK, first.model_dump(), *results]).choices[0].message.content, ANSWER)

    def test_stream_tools(self):
        for ask in self.ways:
            whole = litellm.stream_chunk_builder(list(ask(tools=TOOLS, stream=True)))
            self.assertEqual(calls(whole.choices[0].message), CALLS)

    def test_must_call(self):
        for ask in self.ways:
            must = ask(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "clock"}})
            self.assertEqual([name for name, _ in calls(must.choices[0].message)], ["clock"])

    def test_structured(self):
        for ask in self.ways:
            Report.model_validate_json(ask(response_format=Report).choices[0].message.content)

    def test_errors(self):
        for ask in self.ways:
            with self.assertRaises(litellm.BadRequestError):
                ask(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}])


if __name__ == "__main__":
    unittest.main()
