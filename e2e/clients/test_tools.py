"""The official Python library, unmodified, against a model that thinks and calls tools.

Run by scripts/clients, which makes the model (caller.py), starts xpyd and sets XPYD_URL.
"""
import json
import os
import unittest

import openai

CLIENT = openai.OpenAI(base_url=os.environ["XPYD_URL"] + "/v1", api_key="unused", max_retries=0, timeout=30)
MODEL = os.environ["XPYD_MODEL"]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}} for name in ("weather", "clock")]
ASK = [{"role": "user", "content": "How warm is it?"}]
CALLS = [("weather", {"city": "Oslo", "days": 2}), ("clock", {})]


def calls(message):
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


class Tools(unittest.TestCase):
    def ask(self, **more):
        return CLIENT.chat.completions.create(**{"model": MODEL, "messages": ASK, "tools": TOOLS, **more})

    def test_plain(self):
        r = self.ask()
        c = r.choices[0]
        self.assertEqual((c.finish_reason, c.message.content, calls(c.message)), ("tool_calls", None, CALLS))
        self.assertEqual(c.message.reasoning_content, "\nOslo it is.\n")
        self.assertEqual(r.usage.completion_tokens_details.reasoning_tokens, 4)
        self.assertEqual(len({x.id for x in c.message.tool_calls}), 2)

    def test_loop(self):
        """As an agent: the answer goes back as it is, with the tools' results."""
        message = self.ask().choices[0].message
        history = ASK + [message] + [{"role": "tool", "tool_call_id": c.id, "content": "21"} for c in message.tool_calls]
        last = self.ask(messages=history).choices[0]
        self.assertEqual((last.finish_reason, last.message.content, last.message.tool_calls), ("stop", "It is 21 degrees.", None))

    def test_stream(self):
        reasoning, usage = "", None
        with CLIENT.chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS, stream_options={"include_usage": True}) as stream:
            for event in stream:
                if event.type == "chunk":
                    usage = event.chunk.usage or usage
                    for c in event.chunk.choices:
                        reasoning += getattr(c.delta, "reasoning", None) or ""
            choice = stream.get_final_completion().choices[0]
        self.assertEqual((choice.finish_reason, choice.message.content or None, calls(choice.message)), ("tool_calls", None, CALLS))
        self.assertEqual(reasoning, "\nOslo it is.\n")
        self.assertEqual(usage.completion_tokens_details.reasoning_tokens, 4)

    def test_choice(self):
        none = self.ask(tool_choice="none").choices[0]
        self.assertEqual((none.finish_reason, none.message.content, none.message.tool_calls), ("stop", "It is 21 degrees.", None))
        one = self.ask(parallel_tool_calls=False).choices[0]
        self.assertEqual((one.finish_reason, calls(one.message)), ("tool_calls", CALLS[:1]))
        must = self.ask(tool_choice="required").choices[0]
        self.assertTrue(must.message.tool_calls and must.message.tool_calls[0].function.name in ("weather", "clock"), must)
        named = self.ask(tool_choice={"type": "function", "function": {"name": "clock"}}).choices[0]
        self.assertEqual([c.function.name for c in named.message.tool_calls], ["clock"])
        with self.assertRaises(openai.BadRequestError) as e:
            self.ask(tool_choice="any")
        self.assertEqual(e.exception.param, "tool_choice")

    def test_choices(self):
        r = self.ask(n=3, logprobs=True)
        self.assertEqual([calls(c.message) for c in r.choices], [CALLS] * 3)
        self.assertEqual(len({x.id for c in r.choices for x in c.message.tool_calls}), 6)
        self.assertTrue(all(len(c.logprobs.content) == 12 for c in r.choices))


if __name__ == "__main__":
    unittest.main()
