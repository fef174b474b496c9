// A calculator agent in Node, without packages: task on stdin, model at OPENAI_BASE_URL, {"reward": …} printed last.
// It knows nothing of Agent Lightning.

const TOOL = {
  type: "function",
  function: {
    name: "calc",
    description: "One operation on two numbers.",
    parameters: {
      type: "object",
      properties: {
        a: { type: "number" },
        op: { type: "string", enum: ["+", "-", "*", "/"] },
        b: { type: "number" },
      },
      required: ["a", "op", "b"],
    },
  },
};
const OPERATIONS = { "+": (a, b) => a + b, "-": (a, b) => a - b, "*": (a, b) => a * b, "/": (a, b) => a / b };

async function ask(messages) {
  const { OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL } = process.env;
  const response = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${OPENAI_API_KEY}`, "content-type": "application/json" },
    body: JSON.stringify({ model: OPENAI_MODEL, messages, tools: [TOOL], max_tokens: 64 }),
  });
  if (!response.ok) throw new Error(`${response.status} ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

function calculate(text) {
  try {
    const { a, op, b } = JSON.parse(text);
    const value = OPERATIONS[op](a, b);
    return Number.isFinite(value) ? String(Number(value.toFixed(4))) : "Error: not a finite number";
  } catch {
    return "Error: give a, op and b";
  }
}

async function solve(question) {
  const messages = [
    { role: "system", content: "Answer the question. Use the calc tool for every operation." },
    { role: "user", content: question },
  ];
  for (let turn = 0; turn < 4; turn++) {
    const message = await ask(messages);
    if (!message.tool_calls?.length) return message.content ?? "";
    messages.push(message);
    for (const call of message.tool_calls)
      messages.push({ role: "tool", tool_call_id: call.id, content: calculate(call.function.arguments) });
  }
  return "";
}

const task = JSON.parse(require("fs").readFileSync(0, "utf8"));
solve(task.question).then((answer) => {
  const last = answer.match(/-?\d+(\.\d+)?/g)?.at(-1);
  console.log(JSON.stringify({ answer, reward: Number(last) === task.answer ? 1 : 0 }));
});
