"""The acceptance cases of Open Responses (openresponses.org) against a model that thinks and calls tools, with every
answer and every event held against its schemas, as the PyPI package openresponses-types has them.

What its own runner sends besides is not served: WebSockets and /responses/compact. The model reads no images, so
that case is a refusal.

Run by scripts/clients, which makes the model (caller.py), starts xpyd and sets XPYD_URL.
"""
import json
import os
import unittest
import urllib.error
import urllib.request
from typing import get_args

import openresponses_types.types as spec

URL, MODEL = os.environ["XPYD_URL"] + "/v1/responses", os.environ["XPYD_MODEL"]
EVENTS = {}  # by the event's type
for name in dir(spec):
    if name.endswith("StreamingEvent"):
        kind = getattr(spec, name).model_fields["type"].annotation
        EVENTS[str((get_args(kind) or [*kind])[0])] = getattr(spec, name)
# OpenAI's names, which its libraries know; all else of these events is the same.
RENAMED = {"response.reasoning_text.delta": "response.reasoning.delta", "response.reasoning_text.done": "response.reasoning.done"}
WEATHER = [{"type": "function", "name": "weather", "description": "It tells how warm a city is.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}}, "required": ["city"]}}]


def message(role, content, **more):
    return {"type": "message", "role": role, "content": content, **more}


def ask(items, path="", **more):
    body = json.dumps({"model": MODEL, "input": items, **more}).encode()
    return urllib.request.urlopen(urllib.request.Request(URL + path, body, {"Content-Type": "application/json", "Authorization": "Bearer unused"}), timeout=30)


class OpenResponses(unittest.TestCase):
    def whole(self, items, **more):
        with ask(items, **more) as r:
            body = json.load(r)
        response = spec.ResponseResource.model_validate(body)
        self.assertTrue(response.output)
        self.assertEqual(response.status, "completed")
        return body

    def stream(self, items, **more):
        """Returns the events; the last has the response."""
        events = []
        with ask(items, stream=True, **more) as r:
            self.assertTrue(r.headers["Content-Type"].startswith("text/event-stream"))
            for block in r.read().decode().split("\n\n"):
                lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
                if lines and lines["data"] != "[DONE]":
                    event = json.loads(lines["data"])
                    self.assertEqual(lines["event"], event["type"])
                    name = RENAMED.get(event["type"], event["type"])
                    EVENTS[name].model_validate({**event, "type": name})
                    events.append(event)
        self.assertEqual([e["sequence_number"] for e in events], list(range(len(events))))
        response = spec.ResponseResource.model_validate(events[-1]["response"])
        self.assertEqual((events[-1]["type"], response.status), ("response.completed", "completed"))
        return events

    def test_text(self):
        self.whole([message("user", "Greet me in three words.")])

    def test_system(self):
        self.whole([message("system", "You are a sailor."), message("user", "Greet me.")])

    def test_turns(self):
        self.whole([message("user", "I am Ada."), message("assistant", "Hello Ada, what can I do?"), message("user", "Who am I?")])

    def test_phase(self):
        self.whole([message("assistant", "I should say the number.", phase="commentary"), message("assistant", "It is four.", phase="final_answer"),
                    message("user", "The number alone.")])

    def test_stream(self):
        events = self.stream([message("user", "Count to five.")])
        self.assertIn("response.output_text.delta", [e["type"] for e in events])

    def test_tool(self):
        body = self.whole([message("user", "How warm is it in Oslo?")], tools=WEATHER)
        self.assertIn("function_call", [item["type"] for item in body["output"]])

    def test_stream_tool(self):
        events = self.stream([message("user", "How warm is it in Oslo?")], tools=WEATHER)
        seen = [(e["type"], e.get("item", {}).get("type")) for e in events]
        for want in (("response.output_item.added", "function_call"), ("response.function_call_arguments.delta", None),
                     ("response.function_call_arguments.done", None), ("response.output_item.done", "function_call")):
            self.assertIn(want, seen)

    def refused(self, status, items, path="", **more):
        with self.assertRaises(urllib.error.HTTPError) as e:
            ask(items, path, **more)
        self.assertEqual(e.exception.code, status)
        return json.load(e.exception)["error"]

    def test_image(self):
        parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}]
        error = self.refused(400, [message("user", parts)])
        self.assertEqual((error["type"], error["param"]), ("invalid_request_error", "input"))

    def test_compact(self):
        self.refused(405, [message("user", "Be brief.")], "/compact")


if __name__ == "__main__":
    unittest.main()
