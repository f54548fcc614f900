"""A LangGraph agent on your own server: it calls tools until it has the answer.

    lmi serve Qwen/Qwen3-8B                            # or any model that calls tools
    python langgraph_agent.py "What are 12 boxes of 24 bottles?"

LMI_URL is another server, LMI_API_KEY its key. Needs: pip install langgraph langchain-openai
"""

from __future__ import annotations

import os
import sys

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


url, key = os.environ.get("LMI_URL", "http://127.0.0.1:8080"), os.environ.get("LMI_API_KEY", "none")
model = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model="model", temperature=0).bind_tools([multiply])


def ask(state: MessagesState) -> MessagesState:
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("ask", ask)
graph.add_node("tools", ToolNode([multiply]))
graph.add_edge(START, "ask")
graph.add_conditional_edges("ask", tools_condition)  # to the tools where it calls any, else to the end
graph.add_edge("tools", "ask")
for update in graph.compile().stream({"messages": [("user", sys.argv[1])]}, stream_mode="updates"):
    for step in update.values():
        print(step["messages"][-1].content or f"calls {step['messages'][-1].tool_calls[0]['args']}")
