"""LangChain, unmodified, against a model that thinks and calls tools, by both of OpenAI's APIs.

Run by scripts/clients, which makes the model (caller.py), starts xpyd and sets XPYD_URL.
"""
import os
import unittest
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

ASK, ANSWER = "How warm is it?", "It is 21 degrees."
CALLS = [("weather", {"city": "Oslo", "days": 2}), ("clock", {})]


@tool
def weather(city: str = "", days: int = 1) -> str:
    """It tells how warm it is."""
    return f"{city} {days}: 21"


@tool
def clock() -> str:
    """It tells the time."""
    return "noon"


class Report(BaseModel):  # no free text in it: the model would never end that
    """What the weather is like."""
    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    rain: bool


class LangChain(unittest.TestCase):
    models = [ChatOpenAI(model=os.environ["XPYD_MODEL"], base_url=os.environ["XPYD_URL"] + "/v1", api_key="unused", max_retries=0, timeout=30,
                         use_responses_api=responses, max_tokens=400, temperature=0, stream_usage=True) for responses in (False, True)]

    def test_text(self):
        for model in self.models:
            whole = model.invoke(ASK)
            self.assertEqual((whole.text, whole.usage_metadata["output_tokens"]), (ANSWER, 3))
            pieces = list(model.stream(ASK))
            self.assertEqual("".join(p.text for p in pieces), ANSWER)
            self.assertEqual(sum(p.usage_metadata["output_tokens"] for p in pieces if p.usage_metadata), 3)

    def test_tools(self):
        run = {"weather": weather, "clock": clock}
        for model in self.models:
            bound = model.bind_tools([weather, clock])
            first = bound.invoke(ASK)
            self.assertEqual([(c["name"], c["args"]) for c in first.tool_calls], CALLS)
            results = [ToolMessage(run[c["name"]].invoke(c["args"]), tool_call_id=c["id"]) for c in first.tool_calls]
            self.assertEqual(bound.invoke([HumanMessage(ASK), first, *results]).text, ANSWER)
            total = None
            for piece in bound.stream(ASK):
                total = piece if total is None else total + piece
            self.assertEqual([(c["name"], c["args"]) for c in total.tool_calls], CALLS)

    def test_choice(self):
        for model in self.models:
            any_of = model.bind_tools([weather, clock], tool_choice="any").invoke(ASK)
            self.assertTrue(any_of.tool_calls and {c["name"] for c in any_of.tool_calls} <= {"weather", "clock"}, any_of)
            named = model.bind_tools([weather, clock], tool_choice="clock").invoke(ASK)
            self.assertEqual([c["name"] for c in named.tool_calls], ["clock"])

    def test_structured(self):
        for model in self.models:
            for method in ("json_schema", "function_calling"):
                got = model.with_structured_output(Report, method=method).invoke(ASK)
                self.assertIsInstance(got, Report)


if __name__ == "__main__":
    unittest.main()
