#!/bin/sh
# An agent of one model call: curl and sed, nothing else. It prints what the model answered; it knows of no reward.
# Task in $AGL_TASK (agl … --task-as env), model at $OPENAI_BASE_URL.
set -eu

question=$(printf '%s' "$AGL_TASK" | sed 's/.*"question": "\([^"]*\)".*/\1/')

curl --silent --show-error --fail "$OPENAI_BASE_URL/chat/completions" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" --data-binary @- <<EOF
{
  "model": "$OPENAI_MODEL",
  "max_tokens": 48,
  "tools": [{"type": "function", "function": {
    "name": "calc",
    "description": "One operation on two numbers.",
    "parameters": {"type": "object", "required": ["a", "op", "b"], "properties": {
      "a": {"type": "number"}, "op": {"type": "string", "enum": ["+", "-", "*", "/"]}, "b": {"type": "number"}}}}}],
  "messages": [
    {"role": "system", "content": "Answer the question. Use the calc tool for every operation."},
    {"role": "user", "content": "$question"}]
}
EOF
