"""An agent that knows nothing of asyncrl: it asks a model for two numbers, and one answer as JSON.

It prints its reward. With the number 0 it fails."""

import json
import os
import sys
import urllib.request

low = int(sys.argv[1])


def post(path, body, **headers):
    """The answer of one request."""
    request = urllib.request.Request(
        path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def chat(messages, **more):
    """The message of a turn by OpenAI's chat completions."""
    body = {"model": "gpt-9", "messages": messages, "temperature": 0.1, **more}
    key = f"Bearer {os.environ['OPENAI_API_KEY']}"
    answer = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, Authorization=key)
    return answer["choices"][0]["message"]


messages = [{"role": "user", "content": str(low)}]
fails = int(sys.argv[2]) % 8 == 0
limit = {"max_tokens": 4} if fails else {}  # a turn that the run cuts would be to blame
messages += [chat(messages, **limit), {"role": "user", "content": "higher"}]
if fails:
    sys.exit("this task fails")
second = chat(messages)
# The same chat goes on by Anthropic's API.
answer = post(
    f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages",
    {
        "model": "claude-9",
        "max_tokens": 12,
        "messages": [
            *messages,
            {"role": "assistant", "content": second["content"] or ""},
            {"role": "user", "content": "lower"},
        ],
    },
    **{"x-api-key": os.environ["ANTHROPIC_API_KEY"]},
)
print("log")
print(json.dumps({"reward": len(answer["content"]), "tokens": answer["usage"]["output_tokens"]}))
